"""The folder in which vLLM and the compilers below it write, and the name of a model in their keys."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from torch._inductor import config
from torch._inductor.utils import clear_caches

_VARIABLES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def compile_into(folder: str) -> None:
    """Makes this process compile into ``folder``; empty: where it does already."""
    if folder:
        os.environ.update({name: os.path.join(folder, part) for name, part in _VARIABLES.items()})
        config.cpp_cache_precompile_headers = False  # the key of compiled code would have the path of the headers
        clear_caches()  # what another model has compiled in this process would be missing in the folder


def name_of(document: dict[str, Any]) -> str:
    """The name of a model by its config: vLLM's keys contain the name, which is otherwise the path of the config."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

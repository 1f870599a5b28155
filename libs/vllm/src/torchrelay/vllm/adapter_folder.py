"""A LoRA adapter of a model in vLLM, which takes it from a folder with PEFT's two files."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final
from weakref import finalize

from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from torchrelay.common.errors import InvalidRequest, Overloaded
from torchrelay.common.host.machine import SHARED_MEMORY

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX: Final = "torchrelay-adapter-"
_numbers: Final = count(1)  # vLLM tells adapters apart by them


@dataclass(eq=False)
class VllmAdapter:
    """An adapter that vLLM has. Its folder, in shared memory, exists as long as this or a copy: vLLM reads it again
    after it has taken others in the adapter's place.
    """

    adapter_id: str
    num_bytes: int
    request: LoRARequest
    folder: Folder


class Folder:
    """A folder in shared memory with the files of an adapter, locked and later removed by this object."""

    def __init__(self, document: bytes, weights: bytes) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_MEMORY))
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        finalize(self, _remove, self.path, descriptor)
        (self.path / _CONFIG).write_bytes(document)
        (self.path / _WEIGHTS).write_bytes(weights)


def _remove(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def remove_stale_folders() -> None:
    """Removes folders that workers of this host have left behind, because they were killed."""
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a worker has it
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


class VllmAdapterReader:
    """Hands the files of an adapter to vLLM, once it has started."""

    def __init__(
        self, started: Callable[[], LLMEngine | None], adapter_id: str, document: bytes, weights: bytes
    ) -> None:
        """``started`` gives vLLM, or None before it has started; it raises ``Conflict`` after its end."""
        self._started, self._adapter_id = started, adapter_id
        self._document, self._weights = document, weights
        self._adapter: VllmAdapter | None = None

    @property
    def num_bytes(self) -> int:
        return len(self._weights)

    def read_part(self) -> bool:
        """Raises ``InvalidRequest`` with vLLM's reason where it refuses the adapter, ``Overloaded`` if shared memory is
        full, and ``Conflict``.
        """
        vllm = self._started()
        if vllm is None:
            return True
        try:
            folder = Folder(self._document, self._weights)
        except OSError as error:
            raise Overloaded(f"{SHARED_MEMORY} does not take the adapter: {error.strerror}", field="model") from error
        request = LoRARequest(self._adapter_id, next(_numbers), str(folder.path))
        try:
            vllm.add_lora(request)
        except Exception as error:  # vLLM documents none
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(f"vLLM does not serve this adapter: {reason}", field="model") from error
        self._adapter = VllmAdapter(self._adapter_id, self.num_bytes, request, folder)
        return False

    def read(self) -> VllmAdapter:
        assert self._adapter is not None
        return self._adapter

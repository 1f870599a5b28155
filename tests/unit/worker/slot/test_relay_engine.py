"""Torchrelay's own engine in a slot refuses weights that only another engine computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.quantized_checkpoints import FORMATS
from tests.unit.modelspec.test_quantization import LLAMA
from torchrelay.engine.core import LoadFailed
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engine import EngineHooks
from torchrelay.worker.slot.relay_engine import RelayEngine


def test_weights_of_another_engine_end_the_load() -> None:
    settings = WorkerSettings(node_key="00" * 32, worker_id="w", device="cpu", kv_pool_bytes=1 << 20)
    config = LLAMA | {"quantization_config": dict(FORMATS["awq"].config)}
    slab = cast(Any, SimpleNamespace(manifest=SimpleNamespace(config=config), data=memoryview(b"")))
    hooks = EngineHooks(lambda: None, lambda: None, lambda: None)
    with pytest.raises(LoadFailed, match="only the engine vllm computes these weights"):
        RelayEngine(settings).load(slab, hooks)

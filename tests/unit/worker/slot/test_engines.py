"""The engine that a worker's settings name, and the settings that it refuses."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import InvalidRequest
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engines import load_engine


def test_own_engine_refuses_several_devices() -> None:
    settings = WorkerSettings(node_key="ab" * 32, worker_id="w", devices=2)
    with pytest.raises(InvalidRequest) as caught:
        load_engine(settings)
    assert caught.value.field == "devices"
    assert caught.value.message == (
        "engine 'torchrelay' computes a model on one device, and this slot has 2; vllm splits models"
    )

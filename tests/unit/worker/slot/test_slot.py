"""The slot's states, its epoch, its watchers, and the engine that the settings name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.quantized_checkpoints import FORMATS
from tests.unit.modelspec.test_quantization import LLAMA
from torchrelay.common.errors import Conflict, InvalidRequest, StaleEpoch
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.core import LoadFailed
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engine import EngineHooks
from torchrelay.worker.slot.engines import load_engine
from torchrelay.worker.slot.relay_engine import RelayEngine
from torchrelay.worker.slot.slot import DRAINING, FREE, LOADING, READY, HostedInstance, Slot

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


def hosted(instance_id: str = "ins-1") -> HostedInstance:
    shape = types_pb2.ModelShape(num_layers=4)
    return HostedInstance(instance_id, types_pb2.ModelVersion(model="acme/m", pack_id="p", shape=shape), [PREFILL])


async def test_taken_slot_refuses_other_instance() -> None:
    slot = Slot()
    await slot.begin_load(hosted())
    with pytest.raises(Conflict, match="ins-1"):
        await slot.begin_load(hosted("ins-2"))
    assert slot.state == LOADING
    await slot.release("the store is gone", store_was_lost=True)
    report = slot.report()
    failure = report.model, report.error, report.store_was_lost
    assert (slot.state, failure) == (FREE, ("acme/m", "the store is gone", True))
    await slot.begin_load(hosted("ins-2"))
    await slot.release("the disk is gone")
    report = slot.report()
    assert (report.error, report.store_was_lost) == ("the disk is gone", False)
    await slot.begin_load(hosted("ins-3"))
    assert slot.report().error == ""
    await slot.release()
    assert slot.report().model == ""


async def test_slot_serves_while_loading_and_ready_only() -> None:
    slot = Slot()
    await slot.begin_load(hosted())
    taken = {}
    for state in (LOADING, READY, DRAINING):
        await slot.move(state)
        taken[state] = slot.serving_instance("ins-1", PREFILL) is not None
    assert taken == {LOADING: True, READY: True, DRAINING: False}
    await slot.move(READY)
    assert slot.serving_instance("ins-1", DECODE) is None
    assert slot.serving_instance("ins-2", PREFILL) is None
    await slot.set_roles([PREFILL, DECODE])
    assert slot.serving_instance("ins-1", DECODE) is not None


def test_lower_epoch_is_refused() -> None:
    slot = Slot()
    slot.epoch.check(5)
    slot.epoch.check(5)
    with pytest.raises(StaleEpoch, match="epoch 4"):
        slot.epoch.check(4)
    assert slot.epoch.highest == 5


async def test_watchers_see_state_at_once_and_every_change() -> None:
    slot = Slot()
    seen: list[int] = []
    changes = slot.changes()
    await anext(changes)
    seen.append(slot.state)
    for state in (LOADING, READY):
        waiting = asyncio.ensure_future(anext(changes))
        await slot.move(state)
        await waiting
        seen.append(slot.state)
    assert seen == [FREE, LOADING, READY]


async def test_watchers_get_false_without_change() -> None:
    slot = Slot()
    changes = slot.changes(0.01)
    assert [await anext(changes) for _ in range(3)] == [True, False, False]
    await slot.move(LOADING)
    assert await anext(changes)


async def test_watchers_of_closed_slot_end() -> None:
    slot = Slot()
    changes = slot.changes()
    await anext(changes)
    await slot.close()
    with pytest.raises(StopAsyncIteration):
        await anext(changes)
    assert [change async for change in slot.changes()] == []


def test_own_engine_refuses_several_devices() -> None:
    settings = WorkerSettings(node_key="ab" * 32, worker_id="w", devices=2)
    with pytest.raises(InvalidRequest) as caught:
        load_engine(settings)
    assert caught.value.field == "devices"
    assert caught.value.message == (
        "engine 'torchrelay' computes a model on one device, and this slot has 2; vllm splits models"
    )


def test_weights_of_another_engine_end_the_load() -> None:
    settings = WorkerSettings(node_key="00" * 32, worker_id="w", device="cpu", kv_pool_bytes=1 << 20)
    config = LLAMA | {"quantization_config": dict(FORMATS["awq"].config)}
    slab = cast(Any, SimpleNamespace(manifest=SimpleNamespace(config=config, is_opaque=False), data=memoryview(b"")))
    hooks = EngineHooks(lambda: None, lambda: None, lambda: None)
    with pytest.raises(LoadFailed, match="only the engine vllm computes these weights"):
        RelayEngine(settings).load(slab, hooks)

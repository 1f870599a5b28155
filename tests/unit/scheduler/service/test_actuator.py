"""Relays, copies and retention leases as stores get them over gRPC, and as the history and Explain show them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.support.wait import eventually
from tests.unit.scheduler.policy.paper_cluster import a_model
from tests.unit.scheduler.service.scripted_cluster import (
    PACK_BYTES,
    GatewayClient,
    ScriptedCluster,
    ScriptedStore,
    ScriptedWorker,
    a_version,
    cluster,
)
from tests.unit.scheduler.service.test_controller import inputs, recorded_controller
from torchrelay.common.errors import Overloaded
from torchrelay.control.v1 import param_store_pb2, reports_pb2, scheduler_pb2
from torchrelay.scheduler.policy.effects import LoadCommand, LoadOrder
from torchrelay.scheduler.policy.inputs import CommandOutcome
from torchrelay.scheduler.service.actuator import Actuator

PACK = a_version().pack_id
MB = 1e6


def hold_pack(store: ScriptedStore) -> None:
    """The store has the whole pack."""
    store.copies[PACK] = reports_pb2.PackCopy(pack_id=PACK, pack_bytes=PACK_BYTES, num_chunks=8, num_chunks_verified=8)


def take_slot(worker: ScriptedWorker) -> None:
    worker.slot.state, worker.slot.instance_id = reports_pb2.SlotState.STATE_DRAINING, f"of {worker.worker_id}"


async def a_store(it: ScriptedCluster, number: int, mb_per_s: float, whole: bool = True) -> ScriptedStore:
    """A host; where the store has the pack already, both its slots are taken by another model."""
    store, *workers = await it.host(number)
    store.nic = reports_pb2.NicCounters(link_bytes_per_s=mb_per_s * MB)
    if whole:
        hold_pack(store)
        for worker in workers:
            take_slot(worker)
    return store


async def test_slow_relay_gets_another_source(it: ScriptedCluster) -> None:
    await a_store(it, 1, 60)
    await a_store(it, 2, 100)
    target = await a_store(it, 3, 50, whole=False)
    async with it.scheduler(replicate=False) as address, GatewayClient(address) as gateway:
        await gateway.place("r1")
        await eventually(lambda: bool(target.relays))
        relay = target.relays[0]
        assert relay.sources[0].holder_id == "store-1" and relay.sources[-1].holder_id == "remote"
        assert relay.num_striped == 1
        assert relay.urgency == param_store_pb2.RELAY_URGENCY_URGENT
        share = reports_pb2.SourceShare(holder_id="store-1", num_bytes=1, bytes_per_s=5 * MB, following=True)
        target.copies[PACK].shares.append(share)
        await target.touch()
        await eventually(lambda: len(target.relays) == 2)
        again = target.relays[1]
    assert again.sources[0].holder_id == "store-2" and again.sources[0].ticket.holder_id == "store-2"
    assert [source.holder_id for source in again.sources[1:]] == ["store-1", "remote"]
    assert again.num_striped == 2  # what the slow one still brings is welcome
    assert again.urgency == param_store_pb2.RELAY_URGENCY_URGENT


async def test_hung_store_delays_no_other_host(it: ScriptedCluster) -> None:
    """P11: hosts were told one after the other, each as long as the one before took to answer."""
    hosts = [await it.host(number) for number in (1, 2)]
    (_, _, first), (_, second, _) = hosts
    for taken in (first, second):  # free are one that prefers prefill, and one of the other host for decode
        take_slot(taken)
    async with it.scheduler(replicate=False) as address, GatewayClient(address) as gateway:
        for store, *_ in hosts:
            store.answers.clear()
        await gateway.admit("r1")
        await eventually(lambda: all(store.relays for store, *_ in hosts))
        assert [store.num_open_calls for store, *_ in hosts] == [1, 1], "no relay waited for another"
        for store, *_ in hosts:
            store.answers.set()
        await gateway.placement()


async def test_load_from_whole_copy_waits_for_no_store(it: ScriptedCluster) -> None:
    """It goes out beside the relay: a store that is slow delays nobody."""
    store, *workers = await it.host(1)
    hold_pack(store)
    async with it.scheduler(replicate=False) as address, GatewayClient(address) as gateway:
        store.answers.clear()
        await gateway.place("r1")
        assert all(worker.loads for worker in workers) and len(store.relays) <= 1
        store.answers.set()


@pytest.mark.parametrize("hung", [False, True], ids=["both accept", "one hangs"])
async def test_refused_relay_of_whole_copy_ends_its_loads(it: ScriptedCluster, hung: bool) -> None:
    """It has just let the pack go. A worker that hangs delays the news for no other."""
    store, *workers = await it.host(1)
    hold_pack(store)
    store.refusal = Overloaded("this store already downloads 16 packs")
    if hung:
        workers[1].answers.clear()
    async with it.scheduler(replicate=False) as address, GatewayClient(address) as gateway:
        await gateway.admit("r1")
        await eventually(lambda: bool(workers[0].unloads))
        assert workers[0].unloads[0].drain_s == 0.0
        assert workers[1].num_open_calls == hung, "the refusal waited for no hung worker"
        store.refusal = None
        workers[1].answers.set()
        await gateway.placement()


async def test_wake_without_hosts_calls_no_peer() -> None:
    """It was taken for a load of one, and ended the service."""
    nobody: Any = None
    async with asyncio.TaskGroup() as tasks:
        Actuator(nobody, nobody, tasks).start(LoadCommand(a_model(), ()))


async def test_load_of_a_forgotten_version_is_refused() -> None:
    """It ended the whole scheduler, since the tasks of its commands are a group."""
    controller, log = recorded_controller()
    nobody: Any = None
    order = LoadOrder("i-1", "worker-1", frozenset())
    async with asyncio.TaskGroup() as tasks:
        await Actuator(controller, nobody, tasks)._load(LoadCommand(a_model(), ()), order)
    [refused] = inputs(log, "CommandEnded")
    assert (refused["command"]["instance_id"], refused["outcome"]) == ("i-1", CommandOutcome.NOT_FOUND)
    assert "not remembered any more" in refused["cause"]


def num_copies(view: scheduler_pb2.ClusterView) -> int:
    """How many stores have the whole pack, as the scheduler knows."""
    return sum(copy.relay_end_unix_us > 0 for store in view.stores for copy in store.copies if copy.pack_id == PACK)


async def test_woken_model_gets_retained_second_copy_and_lost_copy_is_rebuilt(it: ScriptedCluster) -> None:
    stores = [(await it.host(number))[0] for number in (1, 2, 3)]
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        await gateway.place("r1")
        first = next(store for store in stores if store.relays)
        await first.finish_relay(PACK, time.time_ns() // 1000)
        others = [store for store in stores if store is not first]
        await eventually(lambda: any(store.relays for store in others))
        second, third = sorted(others, key=lambda store: not store.relays)
        (woken,), (copied,) = first.relays, second.relays
        assert woken.urgency == param_store_pb2.RELAY_URGENCY_URGENT and not woken.keep_retained
        assert copied.urgency == param_store_pb2.RELAY_URGENCY_IDLE and copied.keep_retained
        assert [source.holder_id for source in copied.sources] == [first.store_id, "remote"]
        assert copied.sources[0].ticket.receiver_id == second.store_id and copied.epoch == woken.epoch
        await second.finish_relay(PACK, time.time_ns() // 1000)
        await cluster(address, lambda view: num_copies(view) == 2)
        await eventually(lambda: bool(first.retains and second.retains))
        for store in (first, second):
            request = store.retains[-1]
            assert list(request.pack_ids) == [PACK] and request.lease_s == 30 and request.epoch == woken.epoch
        history = gateway.history("copy")
        begun, finished = await history.read(), await history.read()
        assert (begun.kind, finished.kind) == ("copy.replicate", "copy.finished")
        assert begun.model == "acme/tiny" and begun.reason and second.store_id in begun.fields_json
        reply = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny"))
        assert {"replicate", "copied"} <= {decision.kind for decision in reply.decisions}
        await second.kill()
        await eventually(lambda: any(relay.pack_id == PACK for relay in third.relays))
        (rebuilt,) = (relay for relay in third.relays if relay.pack_id == PACK)
        assert rebuilt.urgency == param_store_pb2.RELAY_URGENCY_URGENT and rebuilt.keep_retained

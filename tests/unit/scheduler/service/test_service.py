"""The service with real gRPC servers and a real broker around it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from tests.support.wait import HANG_S, eventually
from tests.unit.scheduler.service.scripted_cluster import (
    CLUSTER_KEY,
    GatewayClient,
    ScriptedCluster,
    ScriptedWorker,
    a_request,
    a_version,
    cluster,
)
from torchrelay.common.errors import Conflict, InvalidRequest, StaleEpoch
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.policy import policy
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.service import epoch
from torchrelay.transfer.protocol.tickets import derive_node_key, verify_ticket

KEY = bytes.fromhex(CLUSTER_KEY)
PACK = a_version().pack_id


async def test_cold_start_relays_once_and_places_with_ticket(
    it: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "ROUND_S", 3600.0)  # nothing in it waits for a round
    store, first, second = await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        placement = await gateway.place("r1")
        (relay,) = store.relays
        assert relay.epoch > 1.6e12 and [source.holder_id for source in relay.sources] == ["remote"]
        assert [*first.loads[0].roles, *second.loads[0].roles] == [types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE]
        assert first.loads[0].version == a_version()
        assert placement.cold and placement.prefill.worker_id == "w-1a" and placement.decode.worker_id == "w-1b"
        assert placement.prefill.instance_id == first.loads[0].instance_id
        assert placement.decode.grpc_address == second.address
        ticket = placement.kv_ticket
        assert (ticket.buffer_id, ticket.holder_id, ticket.receiver_id) == ("r1/1", "w-1a", "w-1b")
        verify_ticket(ticket, "w-1a", derive_node_key(KEY, "w-1a"), int(time.time() * 1000))


async def finish_loads(address: str, *workers: ScriptedWorker) -> None:
    for worker in workers:
        await worker.finish_load()
    await cluster(address, lambda view: {instance.state for instance in view.instances} == {"ready"})


async def test_minimum_loads_model_without_request(it: ScriptedCluster) -> None:
    _, *workers = await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        version = a_version()
        version.scaling.min_instances = 1
        await gateway.send(minimums=scheduler_pb2.Minimums(versions=[version]))
        await eventually(lambda: all(worker.loads for worker in workers))


async def test_deleted_model_leaves_view_and_instances_stay(it: ScriptedCluster) -> None:
    await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        await gateway.place("r1")
        view = await cluster(address, lambda view: bool(view.versions))
        assert list(view.versions[0].models) == [a_version().model]
        await gateway.send(model_deleted=scheduler_pb2.ModelDeleted(model=a_version().model))
        view = await cluster(address, lambda view: not view.versions)
        assert len(view.instances) == 2, "what runs goes on"


async def test_repeated_admissions_have_effect_of_one(it: ScriptedCluster) -> None:
    _, first, second = await it.host(1)
    async with it.scheduler() as address:
        async with GatewayClient(address) as gateway:
            placement = await gateway.place("r1")
        async with GatewayClient(address) as gateway:
            await gateway.admit("r1", current=placement)  # it runs: nothing is to be said
            await gateway.admit("r1")  # the answer was lost on the way
            again = await gateway.placement()
            for item in (placement, again):
                item.ClearField("kv_ticket")
            assert again == placement
            view = await cluster(address, lambda view: bool(view.demand))
            assert [(demand.num_waiting, demand.num_running) for demand in view.demand] == [(0, 1)]
            await gateway.send(release=scheduler_pb2.Release(key=placement.key))
            await cluster(address, lambda view: not view.demand)
        assert len(first.loads) == len(second.loads) == 1


async def test_killed_decode_worker_role_goes_to_prefill_worker(
    it: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "ROUND_S", 3600.0)  # without rounds nothing is found out by silence
    _, first, second = await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        placement = await gateway.place("r1")
        await finish_loads(address, first, second)
        await second.kill()
        resumed = await gateway.place("r1", 2, num_forced_tokens=5, lost_workers=["w-1b"])
        assert resumed.prefill == resumed.decode == placement.prefill
        assert not resumed.HasField("kv_ticket") and not resumed.cold
        assert list(first.role_changes[0].roles) == [types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE]


async def test_store_lost_during_command_loses_no_request(it: ScriptedCluster) -> None:
    store, _, _ = await it.host(1)
    store.answers.clear()
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        await gateway.admit("r1")
        await eventually(lambda: bool(store.relays))
        await store.kill()
        await cluster(address, lambda view: not view.stores and not view.instances)
        await it.host(2)
        placement = await gateway.placement()
        assert placement.prefill.worker_id == "w-2a"


async def test_restarted_scheduler_adopts_instances_and_requests(it: ScriptedCluster) -> None:
    store, first, second = await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        placement = await gateway.place("r1")
        await finish_loads(address, first, second)
    former_epoch = first.epoch
    # Nothing is loaded while reports of running instances arrive.
    async with it.scheduler(settle_s=30.0) as address, GatewayClient(address) as gateway:
        await gateway.admit("r1", current=placement)
        adopted = await gateway.place("r2")
        assert adopted.prefill == placement.prefill and adopted.decode == placement.decode
        assert adopted.key.request_id == "r2"
        view = await cluster(address, lambda view: bool(view.demand))
        assert view.demand[0].num_running == 2
        assert view.epoch > former_epoch
        await eventually(lambda: first.epoch == view.epoch, "the worker learns the epoch")
        assert len(first.loads) == len(second.loads) == len(store.relays) == 1


async def test_failed_loads_refuse_request_with_cause(it: ScriptedCluster) -> None:
    _, first, second = await it.host(1)
    first.refusal = second.refusal = Conflict("the slot is on fire")
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        await gateway.admit("r1")
        event = await gateway.event()
        assert event.refusal.reason == scheduler_pb2.Refusal.REASON_LOAD_FAILED
        assert "the slot is on fire" in event.refusal.message
        # One of a pair may be ordered anew before the other has answered: then that one was not asked twice.
        assert max(len(first.loads), len(second.loads)) == PolicyConfig().load_tries


async def test_scale_to_zero_is_in_history(it: ScriptedCluster) -> None:
    _, first, second = await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        placement = await gateway.place("r1", version=a_version(idle_timeout_s=0.3))
        for worker in (first, second):
            await worker.finish_load()
        await gateway.send(release=scheduler_pb2.Release(key=placement.key))
        await eventually(lambda: bool(first.unloads and second.unloads))
        await cluster(address, lambda view: not view.instances)
        events, history = {}, gateway.history()
        while "instance.released" not in events:
            event = await history.read()
            events[event.kind] = event
        for kind in ("instance.loading", "instance.ready", "instance.draining", "scale.up", "scale.down"):
            event = events[kind]
            assert event.model == "acme/tiny" and event.reason and event.at_unix_us
        assert "idle" in events["scale.down"].reason


async def test_explain_shows_cold_start_from_queue_to_first_token(it: ScriptedCluster) -> None:
    store, first, second = await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        placement = await gateway.place("r1")
        now_us = time.time_ns() // 1000
        await store.finish_relay(PACK, now_us)
        await finish_loads(address, first, second)
        phases = [
            types_pb2.Phase(name="prefill", begin_unix_us=now_us + 20_000, end_unix_us=now_us + 30_000),
            types_pb2.Phase(name="first_token", begin_unix_us=now_us + 30_000, end_unix_us=now_us + 31_000),
        ]
        await gateway.send(release=scheduler_pb2.Release(key=placement.key, ttft_s=0.1, phases=phases))
        await cluster(address, lambda view: not view.demand)
        reply = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(request_id="r1"))
        names = [phase.name for phase in reply.phases]
        assert {"queue", "plan", "relay", "hold", "map", "prefill", "first_token"} == set(names)
        relay = next(phase for phase in reply.phases if phase.name == "relay")
        assert relay.where == "store-1" and "from remote" in relay.detail and "1.5 ms" in relay.detail
        assert relay.end_unix_us - relay.begin_unix_us == 9_000
        assert [phase.begin_unix_us for phase in reply.phases] == sorted(phase.begin_unix_us for phase in reply.phases)
        assert "load" in [decision.kind for decision in reply.decisions]
        model = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny"))
        assert all(decision.reason for decision in model.decisions)
        labels = [line.label for line in model.worth if line.text]
        assert labels in (["bid", "ask"], ["bid", "ask", "idle"]) and not reply.worth
        first.profile = second.profile = reports_pb2.EngineProfile(memory=1.0, bottleneck="memory")
        await cluster(address, lambda view: all(each.profile.bottleneck for each in view.workers))
        model = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny"))
        assert (model.worth[0].label, model.worth[0].text.split(". ")[0]) == ("bottleneck", "memory (2 instances)")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.Explain(scheduler_pb2.ExplainRequest(request_id="r0"))
        assert caught.value.details() == (
            "no recent request has the id 'r0': only requests since the scheduler's start, the last 2,048, are kept"
        )


@pytest.fixture
def without_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers never go above an epoch that they see, as in the first second after a start."""
    monkeypatch.setattr(epoch, "STARTUP_S", 0.0)


@pytest.mark.usefixtures("without_startup")
async def test_newer_scheduler_ends_older(it: ScriptedCluster) -> None:
    store, first, _ = await it.host(1)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with it.scheduler() as address, asyncio.timeout(HANG_S):
            ahead = first.epoch = int(time.time() * 1000) + 30_000
            await cluster(address, lambda view: ahead in {each.epoch for each in view.workers})
            store.epoch = ahead  # the word of one of three peers has not ended it
            await asyncio.Event().wait()
    assert caught.group_contains(StaleEpoch) and store.epoch == ahead


@pytest.mark.usefixtures("without_startup")
async def test_newer_scheduler_without_commands_ends_older(it: ScriptedCluster) -> None:
    """Both only watch, and the broker passes nothing on to the older scheduler once it knows its peers."""
    peers = await it.host(1)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with it.scheduler() as address, asyncio.timeout(HANG_S):
            older = await cluster(address, lambda view: len(view.stores) == 1)
            async with it.scheduler():
                for peer in peers:
                    peer.is_passed_on_by_broker = False
                await asyncio.Event().wait()
    assert caught.group_contains(StaleEpoch)
    assert sum(peer.epoch > older.epoch for peer in peers) >= 2, "more than half of the peers obey the newer one"


async def test_starting_scheduler_exceeds_every_epoch(it: ScriptedCluster) -> None:
    store, first, second = await it.host(1)
    ahead = int(time.time() * 1000) + 60_000  # the clock of the scheduler before went wrong
    store.epoch = first.epoch = second.epoch = ahead
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        await gateway.place("r1")
        assert first.loads[0].epoch == ahead + 1


async def test_stream_without_hello_is_refused(it: ScriptedCluster) -> None:
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        call: Any = gateway.stub.Admit()
        command = scheduler_pb2.AdmitCommand(admit=a_request("r1"))
        await call.write(scheduler_pb2.AdmitCommands(commands=[command]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(error_from_rpc(caught.value), InvalidRequest)

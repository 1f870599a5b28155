"""Copies and retention leases as stores get them over gRPC, and as the history and Explain show them."""

from __future__ import annotations

import json
import time

from tests.support.wait import eventually
from tests.unit.scheduler.service.scripted_cluster import GatewayClient, a_version, cluster, scripted_cluster
from torchrelay.control.v1 import param_store_pb2, scheduler_pb2

PACK = a_version().pack_id


def num_copies(view: scheduler_pb2.ClusterView) -> int:
    """How many stores have the whole pack, as the scheduler knows."""
    return sum(copy.relay_end_unix_us > 0 for store in view.stores for copy in store.copies if copy.pack_id == PACK)


async def test_woken_model_gets_retained_second_copy(nats_url: str) -> None:
    async with scripted_cluster(nats_url) as it:
        hosts = [await it.host(number) for number in (1, 2)]
        stores = [store for store, _, _ in hosts]
        async with it.scheduler(4) as address, GatewayClient(address) as gateway:
            await cluster(address, lambda view: len(view.stores) == 2)
            await gateway.admit("r1")
            await gateway.placement()
            first = next(store for store in stores if store.relays)
            second = next(store for store in stores if store is not first)
            await first.finish_relay(PACK, time.time_ns() // 1000)
            await eventually(lambda: bool(second.relays))
            (woken,), (copied,) = first.relays, second.relays
            assert woken.urgency == param_store_pb2.RELAY_URGENCY_URGENT and not woken.keep_retained
            assert copied.urgency == param_store_pb2.RELAY_URGENCY_IDLE and copied.keep_retained
            assert [source.holder_id for source in copied.sources] == [first.store_id, "remote"]
            assert copied.sources[0].ticket.receiver_id == second.store_id and copied.epoch == woken.epoch
            await second.finish_relay(PACK, time.time_ns() // 1000)
            await eventually(lambda: bool(first.retains and second.retains))
            for store in stores:
                request = store.retains[-1]
                assert list(request.pack_ids) == [PACK] and request.lease_s == 30 and request.epoch == woken.epoch
            js = it.nats.jetstream()
            subscription = await js.subscribe(it.subjects.event("copy.>"), stream=it.subjects.history_stream)
            events: dict[str, dict[str, object]] = {}
            while it.subjects.event("copy.finished") not in events:
                message = await subscription.next_msg(timeout=5)
                events[message.subject] = json.loads(message.data)
            begun = events[it.subjects.event("copy.replicate")]
            assert begun["model"] == "acme/tiny" and begun["store_id"] == second.store_id and begun["reason"]
            reply = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny"))
            assert {"replicate", "copied"} <= {decision.kind for decision in reply.decisions}


async def test_killed_store_causes_urgent_copy(nats_url: str) -> None:
    async with scripted_cluster(nats_url) as it:
        stores = [(await it.host(number))[0] for number in (1, 2, 3)]
        async with it.scheduler(6) as address, GatewayClient(address) as gateway:
            await cluster(address, lambda view: len(view.stores) == 3)
            await gateway.admit("r1")
            await gateway.placement()
            first = next(store for store in stores if store.relays)
            await first.finish_relay(PACK, time.time_ns() // 1000)
            others = [store for store in stores if store is not first]
            await eventually(lambda: any(store.relays for store in others))
            second = next(store for store in others if store.relays)
            await second.finish_relay(PACK, time.time_ns() // 1000)
            third = next(store for store in others if store is not second)
            await cluster(address, lambda view: num_copies(view) == 2)  # the scheduler has read the second's report
            await eventually(lambda: bool(second.retains))
            await second.kill()
            await eventually(lambda: bool(third.relays))
            (rebuilt,) = third.relays
            assert rebuilt.urgency == param_store_pb2.RELAY_URGENCY_URGENT and rebuilt.keep_retained

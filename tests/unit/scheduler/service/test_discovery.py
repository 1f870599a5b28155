"""Discovery tells a worker that shuts down from one that dies."""

from __future__ import annotations

import json

from tests.unit.scheduler.service.scripted_cluster import GatewayClient, cluster, house
from torchrelay.control.v1 import scheduler_pb2


async def test_who_says_goodbye_was_stopped_and_who_does_not_is_lost(nats_url: str) -> None:
    async with house(nats_url) as it:
        _, first, second = await it.host(1)
        async with it.scheduler(2) as address, GatewayClient(address) as door:
            await door.admit("r1")
            await door.placement()
            await cluster(address, lambda view: len(view.instances) == 2)
            await first.leave()
            await cluster(address, lambda view: len(view.instances) == 1)
            await second.kill()
            await cluster(address, lambda view: not view.instances)
            history = door.stub.WatchEvents(
                scheduler_pb2.WatchEventsRequest(kinds=["instance"], since_unix_us=1, follow=True)
            )
            ends = {"instance.stopped": "", "instance.lost": ""}
            causes = {"worker_stopped": "", "worker_gone": ""}
            async for event in history:
                fields = json.loads(event.fields_json)
                if event.kind in ends:
                    ends[event.kind], causes[fields["cause"]] = fields["worker_id"], fields["worker_id"]
                if all(ends.values()):
                    break
            history.cancel()
            assert list(ends.values()) == list(causes.values()) == [first.worker_id, second.worker_id]

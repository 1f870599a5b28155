"""Reports go out until the worker ends, whatever the broker does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.support.stalled_broker import assert_it_ends, stalled_client
from torchrelay.control.v1 import reports_pb2
from torchrelay.worker.reports import Reporter


class Saying(Reporter):
    """Of a worker that needs no engine."""

    activity: tuple[int, ...] = ()

    def report(self) -> reports_pb2.WorkerReport:
        return reports_pb2.WorkerReport(worker_id="w")


async def test_a_cancel_that_the_brokers_client_swallows_ends_the_reports() -> None:
    worker = SimpleNamespace(settings=SimpleNamespace(nats_prefix="", worker_id="w"))
    async with stalled_client() as client:
        await assert_it_ends(Saying(cast(Any, worker), "w:1").run(client), client)

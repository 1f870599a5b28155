"""Reports go out as often as something goes on, until the process ends, whatever the broker does."""

from __future__ import annotations

from tests.support.stalled_broker import assert_it_ends, stalled_client
from torchrelay.common.net.load_reports import POLL_EVERY_S, Cadence, publish_reports
from torchrelay.control.v1 import reports_pb2


def test_disk_message_repeats_on_change_or_interval() -> None:
    cadence = Cadence()
    looks = [(number * POLL_EVERY_S, what) for number, what in enumerate("aaaaaaaaabcca")]
    said = [(round(now_s / POLL_EVERY_S), what) for now_s, what in looks if cadence.is_due(what, now_s)]
    assert said == [(0, "a"), (5, "a"), (9, "b"), (10, "c"), (12, "a")]


async def test_swallowed_cancel_ends_reports() -> None:
    async with stalled_client() as client:
        reports = publish_reports(client, "load", b"key", lambda: 0, lambda: reports_pb2.WorkerReport(worker_id="w"))
        await assert_it_ends(reports, client)

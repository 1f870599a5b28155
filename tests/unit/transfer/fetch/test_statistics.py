"""Statistics of a transfer: bytes per source, who is followed, what went wrong."""

from __future__ import annotations

from torchrelay.transfer.fetch.statistics import TransferStats


def test_statistics_report_bytes_errors_and_sources() -> None:
    stats = TransferStats()
    assert (stats.largest, stats.by_source(), stats.num_repairs) == ("", [], 0)
    stats.joined("host-a")
    assert stats.largest == "host-a"
    stats.received("host-a", 10)
    stats.joined("host-b")
    stats.received("host-b", 30)
    stats.failed("host-a", "it broke")
    stats.left("host-a")
    stats.repaired(2)
    first, second = stats.by_source()
    assert (first.holder_id, first.num_bytes, first.bytes_per_s, first.following, first.error) == (
        "host-a",
        10,
        0.0,
        False,
        "it broke",
    )
    assert (second.holder_id, second.num_bytes, second.following, second.error) == ("host-b", 30, True, "")
    assert second.bytes_per_s > 0
    assert stats.largest == "host-b"
    assert stats.num_repairs == 2

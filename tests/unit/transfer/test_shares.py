"""The tally of a transfer: who brought what, who is followed, what went wrong."""

from __future__ import annotations

from torchrelay.transfer.shares import Tally


def test_shares_tell_bytes_errors_and_who_is_followed() -> None:
    tally = Tally()
    assert (tally.largest, tally.shares(), tally.num_repairs) == ("", [], 0)
    tally.joined("host-a")
    assert tally.largest == "host-a"
    tally.brought("host-a", 10)
    tally.joined("host-b")
    tally.brought("host-b", 30)
    tally.failed("host-a", "it broke")
    tally.left("host-a")
    tally.repaired(2)
    first, second = tally.shares()
    assert (first.holder_id, first.num_bytes, first.bytes_per_s, first.following, first.error) == (
        "host-a",
        10,
        0.0,
        False,
        "it broke",
    )
    assert (second.holder_id, second.num_bytes, second.following, second.error) == ("host-b", 30, True, "")
    assert second.bytes_per_s > 0
    assert tally.largest == "host-b"
    assert tally.num_repairs == 2

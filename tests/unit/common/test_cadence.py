from __future__ import annotations

from torchrelay.common.cadence import CHANGING_S, STILL_S, Cadence


def test_what_changes_is_said_more_often_than_what_does_not() -> None:
    cadence = Cadence()
    pauses = [cadence.pause_s(said) for said in (b"a", b"a", b"a", b"b", b"c", b"c", b"a")]
    assert pauses == [CHANGING_S, STILL_S, STILL_S, CHANGING_S, CHANGING_S, STILL_S, CHANGING_S]

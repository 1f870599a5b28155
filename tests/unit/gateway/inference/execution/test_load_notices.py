"""A waiting client is told what it waits for, as long as the scheduler confirms it."""

from __future__ import annotations

from torchrelay.control.v1.scheduler_pb2 import Loading
from torchrelay.gateway.inference.execution.load_notices import VALID_S, LoadNotices


def told(at: float, **fields: float | bool) -> str:
    notices = LoadNotices()
    notices.note(Loading(version_id="v", **fields), 100.0)  # type: ignore[arg-type]
    return notices.text("v", "acme/tiny", at)


def test_time_left_counts_down_between_notices() -> None:
    fields = {"has_slot": True, "num_layers_ready": 12, "num_layers": 32, "left_s": 3.0}
    assert told(100.0, **fields) == "loading acme/tiny, 12 of 32 layers, about 3.0 s left"
    assert told(101.5, **fields) == "loading acme/tiny, 12 of 32 layers, about 1.5 s left"


def test_prediction_that_has_passed_is_not_shown() -> None:
    assert told(101.0, has_slot=True, left_s=0.5) == "loading acme/tiny"


def test_load_without_a_slot_has_not_begun() -> None:
    assert told(101.0, left_s=14.6) == "acme/tiny waits for a slot, and then about 15 s to load"


def test_notice_that_is_not_repeated_is_over() -> None:
    assert told(100.0 + VALID_S + 0.1, has_slot=True, left_s=60.0) == ""


def test_other_versions_are_not_concerned() -> None:
    notices = LoadNotices()
    notices.note(Loading(version_id="v", has_slot=True, left_s=9.0), 100.0)
    assert notices.text("w", "acme/tiny", 100.0) == ""

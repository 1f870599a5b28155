"""Explanations as tables of 80 columns."""

from __future__ import annotations

from tests.unit.cli.views.test_cluster import drawn
from torchrelay.cli.views.timeline import explanation

DECISION = {
    "at_unix_us": 1_000_000,
    "kind": "time_slice",
    "subject": "inst-aaaaaaaaaaaaaaaaaaaa",
    "reason": "held for 12 s",
}
WORTH = [
    {"label": "bid", "text": "a slot for a time slice of 10 s serves 2.0 requests [1 waiting]: 120 device seconds"},
    {"label": "why", "text": "the time slice of that slot ends in 779 ms"},
]


def test_worth_of_a_slot_follows_the_decisions_within_80_columns() -> None:
    lines = drawn(explanation([], [DECISION], WORTH), 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    (decision,) = [place for place, line in enumerate(lines) if "held for 12 s" in line]
    (bid,) = [
        place for place, line in enumerate(lines) if line.startswith(" bid  a slot for a time slice of 10 s serves 2.0")
    ]
    assert decision < bid and "[1 waiting]" in lines[bid]
    assert lines[bid + 1].strip() == "device seconds" and lines[bid + 2].startswith(
        " why  the time slice of that slot ends in 779 ms"
    )


def test_model_without_decisions_shows_its_worth_alone() -> None:
    text = drawn(explanation([], [], WORTH[:1]), 80)
    assert "decision" not in text and "bid" in text

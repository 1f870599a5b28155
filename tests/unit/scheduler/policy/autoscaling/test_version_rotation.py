"""Each version's turn comes in time, a few at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.scheduler.policy.autoscaling.version_rotation import MOST_PER_S, VersionTurns
from torchrelay.scheduler.policy.config import TURN_S

VERSIONS = [f"v{number:03d}" for number in range(100)]


def test_tick_covers_share_of_versions() -> None:
    turns = VersionTurns(0.5)
    assert turns.due(VERSIONS, 1.0) == VERSIONS  # nobody has looked yet
    assert turns.due(VERSIONS, 1.125) == VERSIONS[:25]
    assert turns.due(VERSIONS, 1.25) == VERSIONS[25:50]
    assert turns.due(VERSIONS, 9.0) == VERSIONS[50:] + VERSIONS[:50]
    assert turns.due([], 9.1) == []


def test_single_version_has_ten_turns_per_second() -> None:
    turns = VersionTurns(0.5)
    times = [number / 50 for number in range(51)]
    assert [now for now in times if turns.due(["v"], now)] == pytest.approx([number / 10 for number in range(11)])


@given(gaps=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=50), number=st.integers(1, 30))
def test_every_version_has_a_turn_per_round(gaps: list[float], number: int) -> None:
    turns, now = VersionTurns(0.5), 0.0
    seen_at = dict.fromkeys(turns.due(VERSIONS[:number], now), now)
    assert len(seen_at) == number
    for gap in gaps:
        before, now = now, now + gap
        seen_at |= dict.fromkeys(turns.due(VERSIONS[:number], now), now)
        assert all(now - at <= 0.5 + gap or at > before for at in seen_at.values())


def test_thousands_of_versions_have_turns_less_often() -> None:
    """A turn of 10,000 versions evaluated 400 at once, for tens of milliseconds."""
    turns, many = VersionTurns(0.5), {f"v{number:05d}": None for number in range(10_000)}
    turns.due(many, 0.0)
    seen = [version_id for step in range(1, 301) for version_id in turns.due(many, step * TURN_S)]
    assert len(seen) == len(set(seen)) and len(seen) == pytest.approx(300 * TURN_S * MOST_PER_S, abs=1)

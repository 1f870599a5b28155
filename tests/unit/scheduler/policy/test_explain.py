"""Timelines and decisions: bounded, in order, and only what belongs to the request."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import NUM_CHUNKS
from torchrelay.scheduler.policy.effects import AttemptPlaced, SchedulerEvent
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.policy.timed_phase import TimedPhase
from torchrelay.scheduler.policy.types import (
    AttemptKey,
    Instance,
    InstancePhase,
    PackCopy,
    Placement,
    ServiceClass,
    SlotStatus,
    WorkerRef,
)

SEAT = WorkerRef("w", "w:1", "i1")
KEY = AttemptKey("r1", 1)


def opened(cold: bool, key: AttemptKey = KEY) -> AttemptPlaced:
    return AttemptPlaced(
        key, "acme/tiny", 10.0, 10.5, Placement(key, SEAT, SEAT, cold, Prediction(ttft_s=0.25, tbt_s=0.02))
    )


def an_instance() -> Instance:
    roles = frozenset[object]()
    return Instance(
        "i1", "acme/tiny", "v", "p", "w", "", "h", roles, InstancePhase.READY, 0, 10.1, accepted_at=10.4  # type: ignore[arg-type]
    )  # fmt: skip


def test_cold_request_shows_load_of_its_instances() -> None:
    explain = ExplainLog()
    copy = PackCopy("p", 1000, NUM_CHUNKS, NUM_CHUNKS, 0, "", 10_150_000, 10_160_000, 10_300_000, "store-9")
    slot = SlotStatus(InstancePhase.READY, "i1", load_phases=(TimedPhase("map", 10_310_000, 10_320_000, "w"),))
    explain.placed(opened(cold=True))
    explain.observe(an_instance(), SlotStatus(), "store-1", None)
    explain.observe(an_instance(), slot, "store-1", copy)
    phases = [TimedPhase("queue", 10_000_000, 10_600_000), TimedPhase("first_token", 10_600_000, 10_700_000)]
    explain.released(KEY, phases, 10.8)
    explained = explain.request("r1")
    assert explained is not None
    phases, decisions = explained
    assert [phase.name for phase in phases] == ["queue", "plan", "relay", "map", "first_token"]
    assert phases[2].where == "store-1" and phases[2].detail == "1 kB from store-9, first chunk after 10.0 ms"
    assert [event.kind for event in decisions] == ["place"] and "250 ms" in decisions[0].reason


def test_placement_event_names_targets() -> None:
    explain = ExplainLog()
    wanted = {"service_class": ServiceClass.INTERACTIVE, "ttft_target_s": 0.2, "tbt_target_s": 0.05}
    explain.placed(structs.replace(opened(cold=False), **wanted))
    explain.placed(structs.replace(opened(cold=False, key=AttemptKey("r1", 2)), **wanted | {"ttft_target_s": 0.0}))
    explained = explain.request("r1")
    assert explained is not None
    first, resumed = (event.reason for event in explained[1])
    assert first.endswith("in 250 ms; targets (interactive): the first 200 ms after it came, 50 ms between tokens")
    assert resumed.endswith("in 250 ms; target: 50 ms between tokens")


def test_present_copy_is_empty_relay_and_warm_request_has_none() -> None:
    explain = ExplainLog()
    old = PackCopy("p", 1000, NUM_CHUNKS, NUM_CHUNKS, 0, "", 5_000_000, 5_000_001, 6_000_000, "remote")
    explain.observe(an_instance(), SlotStatus(), "store-1", old)
    explain.placed(opened(cold=True))
    explain.placed(opened(cold=False, key=AttemptKey("r2", 1)))
    cold, warm = explain.request("r1"), explain.request("r2")
    assert cold is not None and [phase.name for phase in cold[0]] == ["queue", "plan", "relay"]
    assert cold[0][-1].begin_us == cold[0][-1].end_us and "host copy present" in cold[0][-1].detail
    assert warm is not None and [phase.name for phase in warm[0]] == ["queue"]


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_store_clock_does_not_date_load(ahead_s: int) -> None:
    """A relay of a store whose clock is behind was taken for one that had ended before the load was ordered."""
    explain, ahead_us = ExplainLog(), ahead_s * 1_000_000
    stamps = (10_150_000 + ahead_us, 10_160_000 + ahead_us, 10_300_000 + ahead_us)
    copy = PackCopy("p", 1000, NUM_CHUNKS, NUM_CHUNKS, 0, "", *stamps, "store-9")
    explain.placed(opened(cold=True))
    explain.observe(an_instance(), SlotStatus(), "store-1", None)
    explain.observe(an_instance(), SlotStatus(), "store-1", copy)
    explained = explain.request("r1")
    assert explained is not None
    (relay,) = (phase for phase in explained[0] if phase.name == "relay")
    assert relay.detail.startswith("1 kB from store-9") and relay.duration_s == pytest.approx(0.15)


def test_decisions_after_the_end_of_a_request_are_none_of_its() -> None:
    """The end came from the gateway's clock, the decisions from the scheduler's."""
    explain = ExplainLog()
    explain.placed(opened(cold=False))
    explain.note(SchedulerEvent(10.6, "load", "acme/tiny", "i2", "its queue is long"))
    explain.note(SchedulerEvent(11.5, "idle", "acme/tiny", "i2", "idle for 1 s"))

    def kinds() -> list[str]:
        explained = explain.request("r1")
        assert explained is not None
        return [event.kind for event in explained[1]]

    assert kinds() == ["place", "load", "idle"], "it still runs"
    explain.released(KEY, [TimedPhase("decode", 99_000_000, 99_500_000)], 11.0)
    assert kinds() == ["place", "load"]
    explain.placed(opened(cold=False, key=AttemptKey("r1", 2)))
    assert kinds() == ["place", "place", "load", "idle"], "another attempt runs"


def test_rings_are_bounded() -> None:
    explain = ExplainLog(max_requests=3)
    for number in range(10):
        explain.placed(opened(cold=False, key=AttemptKey(f"r{number}", 1)))
    assert explain.request("r6") is None and explain.request("r9") is not None
    explain.released(AttemptKey("r9", 1), [TimedPhase("x", 1, 2)] * 1000, 10.8)
    explained = explain.request("r9")
    assert explained is not None and len(explained[0]) <= 64
    for number in range(1000):
        explain.note(SchedulerEvent(float(number), "load", "acme/tiny", "i", "because"))
    assert len(explain.model("acme/tiny")) == 100
    assert explain.model("acme/none") == []


def test_prediction_is_shown_beside_measurement() -> None:
    explain, placed = ExplainLog(), opened(cold=False)
    explain.placed(placed)
    explain.record_accuracy(KEY, placed.placement, Outcome(ttft_s=0.3, tbt_s=0.021, ended_at=1e6), 11.0)
    explained = explain.request("r1")
    assert explained is not None
    told = explained[1][-1]
    assert (told.kind, told.at) == ("predict", 11.0)
    assert "first token predicted 250 ms, measured 300 ms" in told.reason
    assert "between tokens predicted 20.0 ms, measured 21.0 ms" in told.reason
    explain.record_accuracy(KEY, placed.placement, Outcome(), 12.0)  # it ended without a token: nothing to compare
    again = explain.request("r1")
    assert again is not None and len(again[1]) == len(explained[1])

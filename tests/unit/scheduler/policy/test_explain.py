"""Timelines, decisions, and the bid and ask of a model: bounded, in order, and without a word about other tenants."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import (
    NUM_CHUNKS,
    PaperCluster,
    a_copy,
    a_model,
    a_store,
    a_worker,
    an_instance,
    one_host,
)
from torchrelay.scheduler.policy.config import ScalingMode
from torchrelay.scheduler.policy.effects import AttemptPlaced, SchedulerEvent
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.handlers.views import worth_lines
from torchrelay.scheduler.policy.inputs import FirstToken
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.policy.timed_phase import TimedPhase
from torchrelay.scheduler.policy.types import (
    AttemptKey,
    InstancePhase,
    Model,
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


INSTANCE = an_instance(a_model(), a_worker("w"), instance_id="i1", pack_id="p", created_at=10.1, accepted_at=10.4)


def a_relay(begin_us: int, first_us: int, end_us: int, source: str = "store-9") -> PackCopy:
    return PackCopy("p", 1000, NUM_CHUNKS, NUM_CHUNKS, 0, "", begin_us, first_us, end_us, source)


def request(explain: ExplainLog, request_id: str = "r1") -> tuple[list[TimedPhase], list[SchedulerEvent]]:
    """The phases of the request, and the decisions that concern it."""
    explained = explain.request(request_id)
    assert explained is not None
    return list(explained[0]), list(explained[1])


def test_cold_request_shows_load_of_its_instances() -> None:
    explain = ExplainLog()
    slot = SlotStatus(InstancePhase.READY, "i1", load_phases=(TimedPhase("map", 10_310_000, 10_320_000, "w"),))
    explain.placed(opened(cold=True))
    explain.observe(INSTANCE, SlotStatus(), "store-1", None)
    explain.observe(INSTANCE, slot, "store-1", a_relay(10_150_000, 10_160_000, 10_300_000))
    explain.released(
        KEY, [TimedPhase("queue", 10_000_000, 10_600_000), TimedPhase("first_token", 10_600_000, 10_700_000)], 10.8
    )
    phases, decisions = request(explain)
    assert [phase.name for phase in phases] == ["queue", "plan", "relay", "map", "first_token"]
    assert phases[2].where == "store-1" and phases[2].detail == "1 kB from store-9, first chunk after 10.0 ms"
    assert [event.kind for event in decisions] == ["place"] and "250 ms" in decisions[0].reason


def test_placement_event_names_targets() -> None:
    explain = ExplainLog()
    wanted = {"service_class": ServiceClass.INTERACTIVE, "ttft_target_s": 0.2, "tbt_target_s": 0.05}
    explain.placed(structs.replace(opened(cold=False), **wanted))
    explain.placed(structs.replace(opened(cold=False, key=AttemptKey("r1", 2)), **wanted | {"ttft_target_s": 0.0}))
    first, resumed = (event.reason for event in request(explain)[1])
    wishes = "targets (interactive): the first token within 200 ms of its arrival, 50 ms between tokens"
    assert first.endswith(f"in 250 ms; {wishes}")
    assert resumed.endswith("in 250 ms; target: 50 ms between tokens")


def test_present_copy_is_empty_relay_and_warm_request_has_none() -> None:
    explain = ExplainLog()
    explain.observe(INSTANCE, SlotStatus(), "store-1", a_relay(5_000_000, 5_000_001, 6_000_000, source="remote"))
    explain.placed(opened(cold=True))
    explain.placed(opened(cold=False, key=AttemptKey("r2", 1)))
    cold, warm = request(explain)[0], request(explain, "r2")[0]
    assert [phase.name for phase in cold] == ["queue", "plan", "relay"]
    assert cold[-1].begin_us == cold[-1].end_us and "host copy present" in cold[-1].detail
    assert [phase.name for phase in warm] == ["queue"]


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_store_clock_does_not_date_load(ahead_s: int) -> None:
    """A relay of a store whose clock is behind was taken for one that had ended before the load was ordered."""
    explain = ExplainLog()
    explain.placed(opened(cold=True))
    explain.observe(INSTANCE, SlotStatus(), "store-1", None)
    ahead_us = ahead_s * 1_000_000
    relay = a_relay(10_150_000 + ahead_us, 10_160_000 + ahead_us, 10_300_000 + ahead_us)
    explain.observe(INSTANCE, SlotStatus(), "store-1", relay)
    (phase,) = (phase for phase in request(explain)[0] if phase.name == "relay")
    assert phase.detail.startswith("1 kB from store-9") and phase.duration_s == pytest.approx(0.15)


def test_decisions_after_the_end_of_a_request_are_none_of_its() -> None:
    """The end came from the gateway's clock, the decisions from the scheduler's."""
    explain = ExplainLog()
    explain.placed(opened(cold=False))
    explain.note(SchedulerEvent(10.6, "load", "acme/tiny", "i2", "its queue is long"))
    explain.note(SchedulerEvent(11.5, "idle", "acme/tiny", "i2", "idle for 1 s"))

    def kinds() -> list[str]:
        return [event.kind for event in request(explain)[1]]

    assert kinds() == ["place", "load", "idle"], "it still runs"
    explain.released(KEY, [TimedPhase("decode", 99_000_000, 99_500_000)], 11.0)
    assert kinds() == ["place", "load"]
    explain.placed(opened(cold=False, key=AttemptKey("r1", 2)))
    assert kinds() == ["place", "place", "load", "idle"], "another attempt runs"


def test_rings_are_bounded() -> None:
    explain = ExplainLog(max_requests=3)
    for number in range(10):
        explain.placed(opened(cold=False, key=AttemptKey(f"r{number}", 1)))
    assert explain.request("r6") is None
    explain.released(AttemptKey("r9", 1), [TimedPhase("x", 1, 2)] * 1000, 10.8)
    assert len(request(explain, "r9")[0]) <= 64
    for number in range(1000):
        explain.note(SchedulerEvent(float(number), "load", "acme/tiny", "i", "because"))
    assert len(explain.model("acme/tiny")) == 100
    assert explain.model("acme/none") == []


def test_prediction_is_shown_beside_measurement() -> None:
    explain, placed = ExplainLog(), opened(cold=False)
    explain.placed(placed)
    explain.record_accuracy(KEY, placed.placement, Outcome(ttft_s=0.3, tbt_s=0.021, ended_at=1e6), 11.0)
    decisions = request(explain)[1]
    assert (decisions[-1].kind, decisions[-1].at) == ("predict", 11.0)
    assert "first token predicted 250 ms, measured 300 ms" in decisions[-1].reason
    assert "between tokens predicted 20.0 ms, measured 21.0 ms" in decisions[-1].reason
    explain.record_accuracy(KEY, placed.placement, Outcome(), 12.0)  # it ended without a token: nothing to compare
    assert request(explain)[1] == decisions


BUSY, WAITING, OTHER = a_model("acme/busy"), a_model("acme/waiting"), a_model("birch/other")


def one_slot(busy: Model = BUSY, **config: Any) -> PaperCluster:
    """A slot whose model gets a request every 0.1 s, each of which runs on."""
    scene = one_host("w", store=a_store("s", "host-1", map(a_copy, (BUSY, WAITING, OTHER))), **config)
    for number in range(20):
        scene.serve(busy, f"r{number}")
        scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        scene.pass_time(0.1)
    return scene


def told(scene: PaperCluster, model: str) -> dict[str, str]:
    return {line.label: line.text for line in worth_lines(scene.policy.state, model, scene.now)}


def test_waiting_model_names_victim_time_slice_and_bid() -> None:
    scene = one_slot()
    scene.admit(WAITING, "w")
    scene.pass_time(2.0)
    lines = told(scene, WAITING.name)
    assert list(lines) == ["bid", "victim", "why"]
    saved = "saves 4.5 late requests (1 request waiting, 0.1 more per second)"
    assert lines["bid"].startswith(f"a slot for a time slice of 10 s {saved}")
    assert lines["bid"].endswith(": 272 device seconds")
    assert lines["victim"].startswith("the slot on w, of acme/busy: it asks ")
    assert lines["victim"].endswith("against 4.5 saved")
    assert "the time slice of that slot ends in 6 s" in lines["why"]
    assert "it is taken in 58 s all the same" in lines["why"]


def test_reason_of_the_time_slice_has_the_numbers_that_were_explained() -> None:
    scene = one_slot()
    scene.admit(WAITING, "w")
    scene.pass_time(59.9)
    asked = told(scene, WAITING.name)["victim"].partition(" late requests")[0].rpartition(" ")[2]
    scene.pass_time(0.2)
    (ended,) = scene.told("time_slice")
    assert f"{ended.fields['num_lost']:.1f}" == asked
    assert ended.reason.endswith(f"; without it {asked} requests of this model are late")


def test_busy_model_bids_for_one_more_and_asks_for_its_slot() -> None:
    scene = one_slot()
    lines = told(scene, BUSY.name)
    assert list(lines) == ["bid", "ask"]
    assert lines["bid"].startswith("one more instance beside 1 saves ")
    assert " and costs 1.0 (60 device seconds): " in lines["bid"]
    assert "on w for a time slice costs " in lines["ask"]
    assert lines["ask"].endswith("; its own time slice goes on for 8 s")


def test_competing_tenants_see_no_names_nor_counts_of_each_other() -> None:
    scene = one_slot()
    scene.admit(OTHER, "o")
    scene.pass_time(2.0)
    lines = told(scene, OTHER.name)
    assert lines["victim"] == "the slot on w, of a model of another tenant"
    assert not any("acme" in text or "busy" in text for text in lines.values())
    assert not any("birch" in text for text in told(scene, BUSY.name).values())


def test_tenants_of_the_same_files_see_no_counts_of_all_together() -> None:
    scene = one_slot()
    scene.admit(a_model("birch/busy", version_id=BUSY.version_id, pack_id=BUSY.pack_id), "b")
    for name in (BUSY.name, "birch/busy"):
        lines = told(scene, name)
        assert lines["bid"] == "its files are shared with other tenants: no numbers of all together are shown"
        assert "an undisclosed number of late requests" in lines["ask"]


def test_advice_is_told_as_the_reason() -> None:
    scene = one_host("w", scaling=ScalingMode.ADVISE)
    scene.admit(WAITING, "w")
    assert told(scene, WAITING.name)["why"].startswith("the scheduler only advises")


def test_explaining_changes_no_decision() -> None:
    plain, explained = one_slot(), one_slot()
    for scene in (plain, explained):
        scene.admit(WAITING, "w")
        for _ in range(20):
            scene.pass_time(0.5)
            if scene is explained:
                told(scene, WAITING.name)
                told(scene, BUSY.name)
    assert explained.effects == plain.effects


def test_tenant_that_asks_sees_no_model_of_the_tenant_that_called_last() -> None:
    """The name of the last caller was taken for that of the tenant that asks."""
    secret = a_model("birch/secret")
    scene = one_host("w", store=a_store("s", "host-1", map(a_copy, (WAITING, secret))))
    scene.serve(secret, "busy")
    scene.apply(FirstToken(AttemptKey("busy", 1)))
    scene.admit(WAITING, "own")
    shared = a_model("birch/waiting", version_id=WAITING.version_id, pack_id=WAITING.pack_id)
    scene.admit(shared, "other")
    scene.pass_time(0.5)
    text = " ".join(told(scene, WAITING.name).values())
    assert "victim" in told(scene, WAITING.name) and "birch" not in text, text

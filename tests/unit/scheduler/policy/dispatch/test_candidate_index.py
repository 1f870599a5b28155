"""The instances that a placement looks at, of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_copy, a_model, a_store, a_worker
from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch.candidate_index import CandidateIndex
from torchrelay.scheduler.policy.dispatch.endpoint import Endpoint
from torchrelay.scheduler.policy.dispatch.open_attempts import DispatchedWork
from torchrelay.scheduler.policy.dispatch.placement import Candidate, NoPlacement, place
from torchrelay.scheduler.policy.estimates.kv_transfer_time import KvTransferTimes
from torchrelay.scheduler.policy.inputs import FirstToken
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import (
    BOTH,
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    Placement,
    SlotStatus,
    WorkerRef,
)

NOW, FULL_STEP_S = 1000.0, 0.2
MODEL = a_model(pack_bytes=1024)


def an_entry(number: int, phase: InstancePhase = InstancePhase.READY, loaded_at: float = 0.0) -> Endpoint:
    ref = WorkerRef(f"w{number}", f"w{number}:1", f"i{number}")
    return Endpoint(ref, "host-1", True, True, phase, loaded_at, LatencyModel(), 1 << 20, FULL_STEP_S)


@st.composite
def endpoints(draw: st.DrawFn) -> tuple[list[Endpoint], dict[str, DispatchedWork]]:
    entries, works = [], {}
    for number in range(draw(st.integers(20, 60))):
        entry = an_entry(number)
        if draw(st.integers(0, 9)) == 0:
            entry = an_entry(number, InstancePhase.LOADING, NOW + draw(st.floats(0, 5)))
        elif draw(st.integers(0, 9)) == 0:
            entry = replace(entry, excess_until=NOW + draw(st.floats(-1, 1)))
        work = DispatchedWork(num_choices=draw(st.integers(0, 8)))
        for prompt in range(draw(st.integers(0, 3))):
            begun_at = NOW - draw(st.floats(0, 0.5))
            work.queue.add(AttemptKey(f"r{number}-{prompt}", 1), draw(st.floats(0.01, 0.4)), begun_at)
        entries.append(entry)
        works[entry.instance_id] = work
    return entries, works


@given(endpoints())
def test_full_shortlist_means_no_instance_takes_prompts(
    endpoints: tuple[list[Endpoint], dict[str, DispatchedWork]],
) -> None:
    entries, works = endpoints
    candidate_index = CandidateIndex(entries, works.__getitem__)

    def can_take(among: Sequence[Endpoint]) -> bool:
        return any(entry.queued_s(works[entry.instance_id].queue, NOW) < entry.full_step_s for entry in among)

    if candidate_index.is_full(NOW) and not can_take(candidate_index.entries()):
        assert not can_take(entries)


def test_idle_instance_is_listed_after_its_work_left() -> None:
    entries = [an_entry(number) for number in range(64)]
    works = {entry.instance_id: DispatchedWork(num_choices=1) for entry in entries}
    for entry in entries:
        works[entry.instance_id].queue.add(AttemptKey(entry.instance_id, 1), 0.1, NOW)
    works["i60"] = DispatchedWork()
    candidate_index = CandidateIndex(entries, works.__getitem__)
    assert candidate_index.entries()[0].instance_id == "i60"
    works["i60"].queue.add(AttemptKey("new", 1), 0.5, NOW)
    works["i60"].num_choices = 9
    works["i61"].queue.leave(AttemptKey("i61", 1), NOW)
    for instance_id in ("i60", "i61"):
        candidate_index.change(instance_id)
    listed = [entry.instance_id for entry in candidate_index.entries()]
    assert listed[0] == "i61" and "i60" not in listed


class CountedPlacements:
    """The scheduler's own, and how many instances each looked at."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(
        self,
        admission: Admission,
        model: Model,
        candidates: Sequence[Candidate],
        kv_transfer_times: KvTransferTimes,
        config: PolicyConfig,
        now: float,
        num_answer_tokens: int | None = None,
    ) -> Placement | NoPlacement:
        self.numbers.append(len(candidates))
        return place(admission, model, candidates, kv_transfer_times, config, now, num_answer_tokens)


def a_cluster(num_workers: int) -> tuple[PaperCluster, CountedPlacements]:
    """All have the model, and nothing to do."""
    scene, counted = PaperCluster(PolicyConfig(replicate=False)), CountedPlacements()
    scene.policy.state.strategies = Strategies(place=counted)
    workers = [
        a_worker(
            f"w{number:03}",
            slot=SlotStatus(
                InstancePhase.READY,
                f"i{number:03}",
                MODEL.name,
                MODEL.version_id,
                MODEL.pack_id,
                BOTH,
                4,
                4,
            ),
        )
        for number in range(num_workers)
    ]
    scene.settle(a_store("s", "host-1", [a_copy(MODEL)]), *workers)
    return scene, counted


def test_placement_scores_few_of_many_instances() -> None:
    for num_workers in (60, 200):
        scene, counted = a_cluster(num_workers)
        for number in range(120):
            scene.now += 0.001
            scene.admit(MODEL, f"r{number}")
            if number % 3 == 0:
                scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        assert all(scene.placement(f"r{number}") is not None for number in range(120))
        assert max(counted.numbers) <= 48
        scene.check()


def test_requests_spread_over_all_of_a_large_roster() -> None:
    scene, _ = a_cluster(64)
    for number in range(64):
        scene.admit(MODEL, f"r{number}")
    placements = [scene.placement(f"r{number}") for number in range(64)]
    assert len({placement.prefill.worker_id for placement in placements if placement is not None}) == 64


def test_instance_with_cached_prefix_is_scored() -> None:
    scene, _ = a_cluster(64)
    model = replace(MODEL, routing_block_tokens=64)
    scene.policy.state.models[model.version_id] = model
    hashes = (b"a", b"b")
    scene.policy.state.prefix_index.note("i050", hashes, 1000)
    scene.admit(model, "r", num_prompt_tokens=128, block_hashes=hashes)
    placed = scene.placement("r")
    assert placed is not None and placed.prefill.worker_id == "w050"
    assert placed.predicted.num_cached_tokens == 128


def test_all_instances_are_scored_if_likely_ones_lack_kv() -> None:
    scene, counted = a_cluster(64)
    needed = scene.admit(MODEL, "first").kv_bytes(MODEL)
    for worker_id in list(scene.workers)[:-1]:
        scene.workers[worker_id] = replace(scene.workers[worker_id], kv_pool_bytes=needed - 1)
    scene.report_all()
    scene.admit(MODEL, "second")
    placed = scene.placement("second")
    assert placed is not None and placed.decode.worker_id == "w063"
    assert counted.numbers[-1] == 64

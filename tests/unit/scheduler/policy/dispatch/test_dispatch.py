"""Dispatch: the work ahead of a prompt, pauses for answers, cached prefixes, and the instances that are scored."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.dispatch.test_placement import a_candidate
from tests.unit.scheduler.policy.paper_cluster import (
    CountedPlacements,
    PaperCluster,
    a_copy,
    a_model,
    a_slot,
    a_store,
    a_worker,
    an_admission,
    two_hosts,
)
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempt, OpenAttempts
from torchrelay.scheduler.policy.cluster.prefill_queue import PrefillQueue
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.estimates.prefix_index import PrefixIndex
from torchrelay.scheduler.policy.estimates.requests import Callers
from torchrelay.scheduler.policy.inputs import FirstToken
from torchrelay.scheduler.policy.prediction import Prediction
from torchrelay.scheduler.policy.types import BOTH, AttemptKey, Placement, SlotStatus, WorkerRef

A, B, C = (AttemptKey(name, 1) for name in "abc")


def test_prompt_behind_an_overdue_one_has_not_begun() -> None:
    queue = PrefillQueue()
    queue.add(A, 1.0, now=10.0)
    queue.add(B, 2.0, now=10.2)
    assert queue.ahead_and_overdue_s(10.5) == pytest.approx((2.5, 0.0))
    assert queue.ahead_and_overdue_s(15.0) == pytest.approx((2.0, 4.0)), "nobody says that A is computed"
    assert queue.less_ahead_at(2.5) == pytest.approx(10.5)
    assert math.isinf(queue.less_ahead_at(2.0)), "time alone does not help"
    assert list(queue.not_begun(10.25, is_loading=False)) == [(B, 0.75)]
    assert list(queue.not_begun(14.0, is_loading=False)) == [(B, 3.0)]
    assert list(queue.not_begun(14.0, is_loading=True)) == [(A, 0.0), (B, 1.0)]


def test_pauses_pass_beside_a_prompt_that_is_overdue() -> None:
    """They were owed for ever to answers beside a prompt that never ended."""
    queue = PrefillQueue()
    queue.add(A, 1.0, now=10.0, pause_s=0.3)
    assert queue.paused_s(0.1, now=10.9) == pytest.approx(0.2)
    assert queue.paused_until(0.1) == pytest.approx(11.2)
    assert queue.paused_s(0.1, now=11.15) == pytest.approx(0.05)
    assert queue.paused_s(0.1, now=11.2) == pytest.approx(0.0)
    queue.add(B, 1.0, now=11.3, pause_s=0.3)
    assert queue.paused_until(0.1) == pytest.approx(12.2), "nothing of A's pause is owed any more"


def test_pause_ends_with_last_answer() -> None:
    """It was hidden while there was none, and the next one had it."""
    attempts, both = OpenAttempts(), WorkerRef("w", "", "both")

    def begin(request_id: str, now: float, pause_s: float = 0.0) -> AttemptKey:
        admission = an_admission(a_model(), request_id)
        placement = Placement(admission.key, both, both, False, Prediction(prefill_s=1.0, pause_s=pause_s))
        attempts.open(OpenAttempt(admission, placement, now, kv_bytes=100), now)
        return admission.key

    answer, other = begin("answer", 0.0), begin("other", 0.0)
    attempts.computed(answer, 1.0)
    attempts.computed(other, 1.0)
    prompt = begin("prompt", 2.0, pause_s=0.5)
    attempts.close(other, 2.1)
    assert attempts.work_of("both").queue.owes_pauses, "one answer is there yet"
    attempts.close(answer, 2.2)
    attempts.computed(prompt, 3.0)
    work = attempts.work_of("both")
    assert work.has_answers and not work.queue.owes_pauses
    assert work.queue.paused_s(0.01, 3.0) == 0.0


@pytest.mark.parametrize(("base_s", "expected"), [(0.0, 2), (0.001, 2), (0.010, 6), (0.060, 40)])
def test_prompts_ahead_begin_within_two_fixed_step_times(base_s: float, expected: int) -> None:
    instance = a_candidate("w", BOTH)
    instance.latency = LatencyModel(prefill=StepCost(base_s, num_steps=1))
    assert instance.max_prompts_ahead == expected


def test_version_is_shared_for_two_seconds() -> None:
    callers = Callers()
    callers.note("a", 1.0)
    callers.note("a", 2.0)
    assert not callers.are_several(2.0)
    callers.note("b", 3.0)
    assert callers.are_several(3.5) and not callers.are_several(5.0)


def test_common_prefix_counts_as_cached_at_earlier_instance() -> None:
    scene, model = two_hosts(), a_model(routing_block_tokens=64)
    hashes = (b"1", b"2", b"3")
    admission = scene.admit(model, "r1", num_prompt_tokens=200, block_hashes=hashes)
    scene.finish_loads()
    first = scene.placed("r1")
    instance_id, index = first.prefill.instance_id, scene.policy.state.prefix_index
    assert index.num_blocks(instance_id, hashes) == 0, "nothing is cached before it is computed"
    scene.apply(FirstToken(admission.key))
    scene.admit(model, "r2", num_prompt_tokens=200, block_hashes=(b"1", b"2", b"x"))
    second = scene.placed("r2")
    assert (first.predicted.num_cached_tokens, second.predicted.num_cached_tokens) == (0, 128)
    assert second.predicted.prefill_s < first.predicted.prefill_s
    scene.kill("p")
    assert index.num_blocks(instance_id, hashes) == 0


def test_instances_are_known_by_the_beginning_of_their_prompts() -> None:
    index = PrefixIndex()
    for instance_id in ("i", "j", "k", "i"):
        index.note(instance_id, (b"1", instance_id.encode()), 3)
    assert index.last_noted((b"1", b"x"), 2) == ["i", "k"] and index.last_noted((b"1",), 9) == ["i", "k", "j"]
    assert index.last_noted((b"i",), 9) == index.last_noted((), 9) == []
    index.note("k", (b"2", b"3", b"4"), 3)  # evicts the others
    index.forget("j")
    assert index.last_noted((b"1",), 9) == ["i"]


def test_departed_instance_has_no_prefixes() -> None:
    """Its entry would stay for ever: it is forgotten when the instance goes."""
    scene, model = two_hosts(), a_model(routing_block_tokens=64)
    admission = scene.admit(model, "r1", num_prompt_tokens=200, block_hashes=(b"1", b"2"))
    scene.finish_loads()
    placement = scene.placed("r1")
    worker_id = placement.prefill.worker_id
    scene.workers[worker_id] = replace(scene.workers[worker_id], slot=SlotStatus())
    scene.report(worker_id)
    assert scene.policy.state.instances.get(placement.prefill.instance_id) is None
    scene.apply(FirstToken(admission.key))  # was on its way
    assert scene.policy.state.prefix_index.num_blocks(placement.prefill.instance_id, (b"1",)) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 8)), max_size=30))
def test_number_of_blocks_equals_linear_scan(notes: list[tuple[list[int], int]]) -> None:
    """Hashes are chained: each names its block and all before it."""
    prefix_index = PrefixIndex()
    for blocks, max_blocks in notes:
        hashes = tuple(bytes(blocks[: end + 1]) for end in range(len(blocks)))
        prefix_index.note("i", hashes, max_blocks)
        for other, _ in notes:
            chained = [bytes(other[: end + 1]) for end in range(len(other))]
            alone = [prefix_index.num_blocks("i", (block,)) for block in chained]
            assert prefix_index.num_blocks("i", chained) == [*alone, 0].index(0)


MODEL = a_model(pack_bytes=1024)


def a_cluster(num_workers: int) -> PaperCluster:
    """All have the model, and nothing to do."""
    scene = PaperCluster(PolicyConfig(replicate=False))
    workers = [a_worker(f"w{n:03}", slot=a_slot(MODEL, f"i{n:03}")) for n in range(num_workers)]
    scene.settle(a_store("s", "host-1", [a_copy(MODEL)]), *workers)
    return scene


def test_placement_scores_few_of_many_instances(counted: CountedPlacements) -> None:
    for num_workers in (60, 200):
        scene = a_cluster(num_workers)
        for number in range(120):
            scene.now += 0.001
            scene.admit(MODEL, f"r{number}")
            if number % 3 == 0:
                scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        assert all(scene.placement(f"r{number}") is not None for number in range(120))
        assert max(counted.numbers) <= 48
        scene.check()


def test_requests_spread_over_all_of_a_large_roster() -> None:
    scene = a_cluster(64)
    for number in range(64):
        scene.admit(MODEL, f"r{number}")
    placements = [scene.placement(f"r{number}") for number in range(64)]
    assert len({placement.prefill.worker_id for placement in placements if placement is not None}) == 64


def test_instance_with_cached_prefix_is_scored() -> None:
    scene = a_cluster(64)
    model = replace(MODEL, routing_block_tokens=64)
    scene.policy.state.note_model(model, scene.now)
    hashes = (b"a", b"b")
    scene.policy.state.prefix_index.note("i050", hashes, 1000)
    scene.admit(model, "r", num_prompt_tokens=128, block_hashes=hashes)
    placed = scene.placed("r")
    assert placed.prefill.worker_id == "w050"
    assert placed.predicted.num_cached_tokens == 128


def test_all_instances_are_scored_if_likely_ones_lack_kv(counted: CountedPlacements) -> None:
    scene = a_cluster(64)
    needed = scene.admit(MODEL, "first").kv_bytes(MODEL)
    for worker_id in list(scene.workers)[:-1]:
        scene.workers[worker_id] = replace(scene.workers[worker_id], kv_pool_bytes=needed - 1)
    scene.report_all()
    scene.admit(MODEL, "second")
    placed = scene.placed("second")
    assert placed.decode.worker_id == "w063"
    assert counted.numbers[-1] == 64


def test_loading_instance_has_computed_the_layers_that_it_has() -> None:
    queue = PrefillQueue()
    assert queue.left_by_layer_s(0.5, 10.0) == 0.0
    queue.add(A, 1.0, now=10.0)
    queue.add(B, 2.0, now=10.0)
    assert queue.left_by_layer_s(0.5, 10.4) == pytest.approx(2.6), "one prompt at a time"
    assert queue.left_by_layer_s(0.5, 12.0) == pytest.approx(1.5), "it waits for the other layers"
    queue.add(C, 1.0, now=12.0)
    assert [queue.left_by_layer_s(0.5, now) for now in (12.0, 12.1, 14.0)] == pytest.approx([2.5, 2.4, 2.0])
    queue.leave(A, now=14.0)
    assert queue.left_by_layer_s(1.0, 14.0) == pytest.approx(0.0)

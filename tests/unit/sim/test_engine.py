"""The engine without tensors, step by step against the engine's own batching core."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.common.latency.latency_model import LatencyModel, StepCost, StepWork, attended_positions
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.sequences import BatchPlan, SequenceGroup
from torchrelay.engine.core import ChoiceSpec, GroupSpec, NewToken, SamplingParams
from torchrelay.sim.engine import Decoding, Prompt, SimulatedEngine
from torchrelay.sim.events import EventQueue

LATENCY = LatencyModel(StepCost(0.01, 1e-4, 1e-9, 9), StepCost(0.01, 1e-3, 1e-7, 9), token_budget=512)
Job = tuple[float, int, int]  # arrival, prompt tokens, output tokens


def batched(jobs: list[Job]) -> dict[int, tuple[float, float]]:
    """When each job has its first and its last token, if ``BatchScheduler`` plans the steps."""
    tables = PageTables(100_000, page_tokens=16)
    scheduler = BatchScheduler(
        tables, PrefixCache(tables.allocator, 16, enabled=False), 512, 10**6, copy_page=lambda source, target: None
    )
    times: dict[int, list[float]] = {}
    left, now = sorted(enumerate(jobs), key=lambda one: one[1][0]), 0.0
    while left or scheduler.groups:
        if not scheduler.groups:
            now = max(now, left[0][1][0])
        while left and left[0][1][0] <= now:
            number, (_, num_prompt, num_output) = left.pop(0)
            sampling = SamplingParams(max_tokens=num_output)
            spec = GroupSpec(str(number), tuple(range(num_prompt)), num_prompt, sampling, (ChoiceSpec(0),))
            scheduler.submit(SequenceGroup.of(spec))
        (plan,) = scheduler.plan()
        step_s = LATENCY.step_s(work_of(plan))
        assert step_s is not None
        now += step_s
        tokens = [
            NewToken(d.spec.group_id, 0, d.next_position, 7, d.spec.sampling.finish_of(7, d.next_position))
            for d in plan.decoding
        ]
        for group in (chunk.context.group for chunk in plan.chunks if chunk.ends_context):
            tokens.append(NewToken(group.spec.group_id, 0, 0, 7, group.spec.sampling.finish_of(7, 0)))
        scheduler.commit(plan, tokens)
        for token in tokens:
            times.setdefault(int(token.group_id), []).append(now)
    return {number: (found[0], found[-1]) for number, found in times.items()}


def work_of(plan: BatchPlan) -> StepWork:
    return StepWork(
        sum(chunk.num_tokens for chunk in plan.chunks),
        sum(attended_positions(chunk.begin, chunk.end) for chunk in plan.chunks),
        len(plan.decoding),
        sum(decoding.num_computed + 1 for decoding in plan.decoding),
    )


def simulated(jobs: list[Job]) -> dict[int, tuple[float, float]]:
    events = EventQueue()
    engine = SimulatedEngine(events, LATENCY)
    first: dict[int, float] = {}
    found: dict[int, tuple[float, float]] = {}

    def arrive(number: int, num_prompt: int, num_output: int) -> None:
        def ended() -> None:
            found[number] = (first[number], events.now)

        def computed() -> None:
            first[number] = events.now
            engine.decode(Decoding(num_prompt + 1, num_output - 1, ended))

        engine.prefill(Prompt(num_prompt, computed))

    for number, (at, num_prompt, num_output) in enumerate(jobs):
        events.at(at, partial(arrive, number, num_prompt, num_output))
    events.run()
    return found


jobs_in_seconds = st.lists(
    st.tuples(st.floats(0, 2, allow_subnormal=False), st.integers(1, 1500), st.integers(1, 40)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(jobs_in_seconds)
def test_every_token_comes_when_the_batching_core_has_it(jobs: list[Job]) -> None:
    """Within a step: where two arrive together at an idle engine, one may get a step of its own."""
    expected, found = batched(jobs), simulated(jobs)
    assert found.keys() == expected.keys()
    longest_step_s = 0.01 + 512e-4 + 0.03
    for number, (first, last) in expected.items():
        assert found[number][0] == pytest.approx(first, abs=longest_step_s)
        assert found[number][1] == pytest.approx(last, abs=longest_step_s)


def test_jobs_apart_take_exactly_what_the_model_says() -> None:
    jobs = [(0.0, 700, 5), (3.0, 100, 30), (3.7, 1300, 2)]
    expected = batched(jobs)
    for number, times in simulated(jobs).items():
        assert times == pytest.approx(expected[number], rel=1e-6)


def test_nothing_ends_before_the_last_layer_is_there() -> None:
    events, ended = EventQueue(), list[float]()
    engine = SimulatedEngine(events, LATENCY, ready_at=float("inf"))
    engine.prefill(Prompt(10, lambda: ended.append(events.now)))
    engine.decode(Decoding(10, 1, lambda: ended.append(events.now)))
    events.run(until=5.0)
    assert ended == []
    engine.now_ready_at(7.0)
    events.run()
    assert len(ended) == 2 and min(ended) >= 7.0


def test_a_cancelled_job_leaves_the_others_their_time() -> None:
    events, ended = EventQueue(), list[str]()
    engine = SimulatedEngine(events, LATENCY)
    going = Decoding(100, 50, lambda: ended.append("going"))
    gone = Decoding(100, 50, lambda: ended.append("gone"))
    engine.decode(going)
    engine.decode(gone)
    events.run(until=0.1)
    num_before = engine.num_tokens_done(going)
    engine.cancel(gone)
    events.run()
    assert ended == ["going"] and 0 < num_before < 50 and engine.num_running == 0


def test_a_prompt_cancelled_in_its_step_is_counted_out_once() -> None:
    """It was subtracted when it left, and again when its step ended: the queue was too short for ever."""
    events = EventQueue()
    engine = SimulatedEngine(events, LATENCY)
    gone = Prompt(1000, lambda: None)
    engine.prefill(gone)
    events.run(until=0.001)
    engine.cancel(gone)
    assert engine.num_queued_tokens == 0
    events.run()
    assert engine.num_queued_tokens == 0 and engine.num_running == 0


def test_a_prompt_cancelled_before_its_step_costs_the_batch_nothing() -> None:
    """An empty step was run for it; who looked meanwhile counted what decodes in it once more."""
    step_s = LATENCY.tbt_s(1, 100)

    def ended_at(cancels: bool) -> float:
        events, ended, counted = EventQueue(), list[float](), list[int]()
        engine = SimulatedEngine(events, LATENCY)
        going = Decoding(100, 20, lambda: ended.append(events.now))
        engine.decode(going)
        prompt = Prompt(1000, lambda: None)
        if cancels:
            events.at(2.1 * step_s, lambda: engine.prefill(prompt))
            events.at(2.2 * step_s, lambda: engine.cancel(prompt))
            events.at(3.5 * step_s, lambda: counted.append(engine.num_tokens_done(going)))
        events.run()
        return ended[0]

    assert ended_at(cancels=True) == pytest.approx(ended_at(cancels=False), rel=1e-4)

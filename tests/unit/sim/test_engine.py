"""The simulated engine against the real engine's batching core, step by step."""

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
    """Times of each job's first and last token when ``BatchScheduler`` plans the steps."""
    tables = PageTables(100_000, page_tokens=16)
    scheduler = BatchScheduler(
        tables, PrefixCache(tables.allocator, 16, enabled=False), 512, 10**6, copy_page=lambda source, target: None
    )
    times: dict[int, list[float]] = {}
    left, now = sorted(enumerate(jobs), key=lambda numbered: numbered[1][0]), 0.0
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
    return {number: (token_times[0], token_times[-1]) for number, token_times in times.items()}


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
    times: dict[int, tuple[float, float]] = {}

    def arrive(number: int, num_prompt: int, num_output: int) -> None:
        def ended() -> None:
            times[number] = (first[number], events.now)

        def computed() -> None:
            first[number] = events.now
            engine.decode(Decoding(num_prompt + 1, num_output - 1, ended))

        engine.prefill(Prompt(num_prompt, computed))

    for number, (at, num_prompt, num_output) in enumerate(jobs):
        events.at(at, partial(arrive, number, num_prompt, num_output))
    events.run()
    return times


jobs_in_seconds = st.lists(
    st.tuples(st.floats(0, 2, allow_subnormal=False), st.integers(1, 1500), st.integers(1, 40)), min_size=1, max_size=12
)


@settings(max_examples=25)
@given(jobs_in_seconds)
def test_token_times_match_batching_core(jobs: list[Job]) -> None:
    """Times differ by at most a step: of two prompts that reach an idle engine together, one may get its own step."""
    expected, times = batched(jobs), simulated(jobs)
    assert times.keys() == expected.keys()
    longest_step_s = 0.01 + 512e-4 + 0.03
    for number, (first, last) in expected.items():
        assert times[number][0] == pytest.approx(first, abs=longest_step_s)
        assert times[number][1] == pytest.approx(last, abs=longest_step_s)


def test_separate_jobs_take_predicted_time() -> None:
    jobs = [(0.0, 700, 5), (3.0, 100, 30), (3.7, 1300, 2)]
    expected = batched(jobs)
    for number, times in simulated(jobs).items():
        assert times == pytest.approx(expected[number], rel=1e-6)


def test_no_job_ends_before_last_layer() -> None:
    events, ended = EventQueue(), list[float]()
    engine = SimulatedEngine(events, LATENCY, ready_at=float("inf"))
    engine.prefill(Prompt(10, lambda: ended.append(events.now)))
    engine.decode(Decoding(10, 1, lambda: ended.append(events.now)))
    events.run(until=5.0)
    assert ended == []
    engine.set_ready_at(7.0)
    events.run()
    assert len(ended) == 2 and min(ended) >= 7.0


def test_cancelled_job_leaves_batch() -> None:
    events, ended = EventQueue(), list[str]()
    engine = SimulatedEngine(events, LATENCY)
    running = Decoding(100, 50, lambda: ended.append("running"))
    cancelled = Decoding(100, 50, lambda: ended.append("cancelled"))
    engine.decode(running)
    engine.decode(cancelled)
    events.run(until=0.1)
    num_before = engine.num_tokens_done(running)
    engine.cancel(cancelled)
    events.run()
    assert ended == ["running"] and 0 < num_before < 50 and engine.num_running == 0


def test_prompt_cancelled_before_step_delays_no_batch() -> None:
    """Regression: an empty step ran for it, and reading ``num_tokens_done`` in that step counted decodes twice."""
    step_s = LATENCY.tbt_s(1, 100)

    def ended_at(cancels: bool) -> float:
        events, ended, counted = EventQueue(), list[float](), list[int]()
        engine = SimulatedEngine(events, LATENCY)
        decoding = Decoding(100, 20, lambda: ended.append(events.now))
        engine.decode(decoding)
        prompt = Prompt(1000, lambda: None)
        if cancels:
            events.at(2.1 * step_s, lambda: engine.prefill(prompt))
            events.at(2.2 * step_s, lambda: engine.cancel(prompt))
            events.at(3.5 * step_s, lambda: counted.append(engine.num_tokens_done(decoding)))
        events.run()
        return ended[0]

    assert ended_at(cancels=True) == pytest.approx(ended_at(cancels=False), rel=1e-4)

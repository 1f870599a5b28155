"""A step of an instance: choose, compute, commit. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrelay.common.latency.latency_model import NO_WORK, StepWork
from torchrelay.engine import profile
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.interruptions import Interruptions
from torchrelay.engine.batching.layerwise import plans_within_budget, runnable_groups
from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk, SequenceGroup
from torchrelay.engine.core import EMPTY_STEP, LoadFailed, PromptProgress, StepResult
from torchrelay.engine.profile import Activity

if TYPE_CHECKING:
    from torchrelay.engine.execution.model_runner import BatchResult, ModelRunner


@dataclass(slots=True)
class Stepper:
    """The loop of an instance, one step per call.

    While weights arrive (``is_loading``), prompts run layer by layer, as far as ``can_run`` allows for a layer. Choices
    and chunks, which need all layers, run afterwards. ``num_free_positions`` bounds the prompts that begin.
    """

    _scheduler: BatchScheduler
    _runner: ModelRunner
    _interruptions: Interruptions
    _is_loading: Callable[[], bool]
    _can_run: Callable[[int], bool]
    _num_free_positions: Callable[[], int]
    _token_budget: int
    work: StepWork = NO_WORK  # of the running step, or of the last one
    _waiting: tuple[SequenceGroup, ...] = ()  # groups that the last step left waiting for a layer
    _waiting_since_s: float = 0.0
    _io_wait_s: float = 0.0  # that no step has reported

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        has_plan = scheduler.can_admit if self._is_loading() else scheduler.has_work
        return has_plan or bool(self._runnable_groups())

    def step(self) -> StepResult:
        """Computes a step as ``Instance.step`` describes."""
        begin_s = time.perf_counter()
        if any(group.contexts for group in self._waiting):
            self._io_wait_s += begin_s - self._waiting_since_s
        self._waiting = ()
        profile.enter(Activity.SCHEDULING)
        try:
            self._interruptions.apply()
            plans = self._plan()
            by_layer = self._runnable_groups()
            work = self.work = _merged(plans).work
            results, computed = self._compute(plans)
            whole = _merged(computed)
            ended = [chunk for chunk in whole.chunks if chunk.ends_context]
            num_prefilled = sum(chunk.num_tokens for chunk in whole.chunks)
            num_again = sum(chunk.num_tokens for chunk in whole.chunks if chunk.context.group.was_preempted)
            has_scores = any(result.prompt_logprobs for result in results)
            if by_layer or has_scores or computed != plans or any(plan.layer for plan in plans):
                work = NO_WORK  # its duration tells nothing about whole batches
            if by_layer:  # its work is predicted as if it ran all layers, since no layer takes longer than that
                self.work = next(plans_within_budget(by_layer, self._token_budget)).work
                self._runner.run_one_layer(by_layer, self._token_budget)
            expired = self._interruptions.take_expired()
            if not (plans or by_layer or expired):
                return EMPTY_STEP
            step_s, num_decoded = time.perf_counter() - begin_s, len(whole.decoding)
            times = step_s, work, replace(profile.take(), io_wait_s=self._io_wait_s)
            self._io_wait_s = 0.0
            prompts, ran_one_layer = _progress(whole.chunks), bool(by_layer)
            return StepResult(
                tuple(token for result in results for token in result.tokens),
                _prefilled(ended),
                num_prefilled,
                num_decoded,
                *times,
                expired,
                prompts,
                ran_one_layer,
                tuple(embedding for result in results for embedding in result.embeddings),
                tuple(scores for result in results for scores in result.prompt_logprobs),
                num_again,
            )
        finally:
            profile.take()  # the time of a step that failed does not count for the next one
            if self._is_loading() and not self.has_work:
                self._waiting, self._waiting_since_s = tuple(self._scheduler.by_layer), time.perf_counter()

    def _plan(self) -> tuple[BatchPlan, ...]:
        if not self._is_loading():
            return self._scheduler.plan()
        self._scheduler.admit(by_layer=True)
        return ()

    def _compute(self, plans: Sequence[BatchPlan]) -> tuple[list[BatchResult], tuple[BatchPlan, ...]]:
        """Computes the plans; returns the results, and the parts of the plans that were left."""
        results: list[BatchResult] = []
        computed: list[BatchPlan] = []
        try:
            for number, plan in enumerate(plans):
                if number:  # parts of it may have ended while the earlier plans were computed
                    plan, _ = plan.live_part()
                if not plan:
                    continue
                left, result = self._runner.run(plan)
                self._scheduler.commit(left, result.tokens)
                results.append(result)
                computed.append(left)
        except LoadFailed:
            self._scheduler.put_back(plans)
            raise
        return results, tuple(computed)

    def _runnable_groups(self) -> tuple[SequenceGroup, ...]:
        groups = self._scheduler.by_layer
        if not groups or not self._is_loading():  # without a load they continue in chunks
            return ()
        return runnable_groups(groups, self._token_budget, self._num_free_positions(), self._can_run)


def _merged(plans: Sequence[BatchPlan]) -> BatchPlan:
    """All batches of a step as one; only the first decodes."""
    return BatchPlan(plans[0].decoding if plans else (), tuple(each for plan in plans for each in plan.chunks))


def _progress(chunks: Sequence[PrefillChunk]) -> tuple[PromptProgress, ...]:
    """The progress of prompts whose last chunk is still to come."""
    return tuple(
        PromptProgress(
            chunk.context.group.spec.group_id,
            min(chunk.end, chunk.context.group.spec.num_prompt_tokens),
            chunk.context.num_cached,
        )
        for chunk in chunks
        if not chunk.ends_context
    )


def _prefilled(ended: Sequence[PrefillChunk]) -> tuple[str, ...]:
    """The groups that have no context left to compute."""
    groups = (chunk.context.group for chunk in ended)
    return tuple(dict.fromkeys(group.spec.group_id for group in groups if not group.contexts))

"""A step of an instance: choose, compute, commit. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrelay.common.latency.latency_model import NO_WORK, StepWork
from torchrelay.engine import profile
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.interruptions import Interruptions
from torchrelay.engine.batching.layerwise import runnable_groups
from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk, SequenceGroup
from torchrelay.engine.core import EMPTY_STEP, LoadFailed, NewToken, PromptProgress, StepResult
from torchrelay.engine.profile import Activity

if TYPE_CHECKING:
    from torchrelay.engine.execution.model_runner import ModelRunner


@dataclass(slots=True)
class Stepper:
    """The loop of an instance, one step per call. ``can_run`` tells whether a layer, or the head, could run now."""

    _scheduler: BatchScheduler
    _runner: ModelRunner
    _interruptions: Interruptions
    _can_run: Callable[[int], bool]
    _num_layers: int
    _token_budget: int
    work: StepWork = NO_WORK  # of the running step, or of the last one

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._runnable_groups())

    def step(self) -> StepResult:
        """Computes a step as ``Instance.step`` describes."""
        begin_s = time.perf_counter()
        profile.enter(Activity.SCHEDULING)
        try:
            self._interruptions.apply()
            plans, by_layer = self._scheduler.plan(), self._runnable_groups()
            work = self.work = _merged(plans).work
            tokens, computed = self._compute(plans)
            whole = _merged(computed)
            ended = [chunk for chunk in whole.chunks if chunk.ends_context]
            num_prefilled = sum(chunk.num_tokens for chunk in whole.chunks)
            if by_layer or computed != plans or any(plan.layer for plan in plans):
                work = NO_WORK  # its duration tells nothing about whole batches
            if by_layer:
                more_tokens, more_ended = self._advance(by_layer)
                tokens, ended = tokens + more_tokens, ended + more_ended
                num_prefilled += sum(chunk.num_tokens for chunk in more_ended)
            expired = self._interruptions.take_expired()
            if not (plans or by_layer or expired):
                return EMPTY_STEP
            step_s, num_decoded = time.perf_counter() - begin_s, len(whole.decoding)
            times = step_s, work, profile.take()
            prompts = _progress(whole.chunks)
            return StepResult(tuple(tokens), _prefilled(ended), num_prefilled, num_decoded, *times, expired, prompts)
        finally:
            profile.take()  # the time of a step that failed does not count for the next one

    def _compute(self, plans: Sequence[BatchPlan]) -> tuple[list[NewToken], tuple[BatchPlan, ...]]:
        """Computes the plans; returns the new tokens, and the parts of the plans that were left."""
        tokens: list[NewToken] = []
        computed: list[BatchPlan] = []
        try:
            for number, plan in enumerate(plans):
                if number:  # parts of it may have ended while the earlier plans were computed
                    plan, _ = plan.live_part()
                if not plan:
                    continue
                left, new_tokens = self._runner.run(plan)
                self._scheduler.commit(left, new_tokens)
                tokens += new_tokens
                computed.append(left)
        except LoadFailed:
            self._scheduler.put_back(plans)
            raise
        return tokens, tuple(computed)

    def _advance(self, groups: Sequence[SequenceGroup]) -> tuple[list[NewToken], list[PrefillChunk]]:
        """Runs one layer of prompts, or returns their first tokens with the chunks that ended them."""
        if not any(group.contexts for group in groups):  # all were cancelled within this step
            return [], []
        if groups[0].layer < self._num_layers:
            self._runner.run_one_layer(groups, self._token_budget)
            return [], []
        plan, tokens = self._runner.end(groups)
        self._scheduler.commit(plan, tokens)
        return tokens, list(plan.chunks)

    def _runnable_groups(self) -> tuple[SequenceGroup, ...]:
        return runnable_groups(self._scheduler.by_layer, self._num_layers, self._token_budget, self._can_run)


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

"""One step: choose, compute, deliver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from torchrelay.common.latency_model import NO_WORK
from torchrelay.engine import profile
from torchrelay.engine.batching.interruptions import Interruptions
from torchrelay.engine.batching.scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk, SequenceGroup
from torchrelay.engine.batching.step_work import work_of
from torchrelay.engine.core import EMPTY_STEP, LoadFailed, NewToken, StepResult
from torchrelay.engine.execution.delivery import deliver
from torchrelay.engine.execution.model_runner import ModelRunner, runnable_groups
from torchrelay.engine.profile import Activity


class Stepper:
    """The loop of an instance, a turn at a time. ``can_run`` tells whether a layer, or the head, could compute now."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        runner: ModelRunner,
        interruptions: Interruptions,
        can_run: Callable[[int], bool],
        num_layers: int,
        token_budget: int,
        device: torch.device,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._interruptions = interruptions
        self._can_run = can_run
        self._num_layers = num_layers
        self._token_budget = token_budget
        self._device = device

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._runnable_groups())

    def step(self) -> StepResult:
        """As ``Instance.step``."""
        begin_s = time.perf_counter()
        profile.enter(Activity.SCHEDULING)
        try:
            self._interruptions.apply()
            plans, by_layer = self._scheduler.plan(), self._runnable_groups()
            work = work_of(_merged(plans))
            tokens, computed = self._compute(plans)
            whole = _merged(computed)
            ended = [chunk for chunk in whole.chunks if chunk.ends_context]
            num_prefilled = sum(chunk.num_tokens for chunk in whole.chunks)
            if by_layer or computed != plans or any(plan.layer for plan in plans):
                work = NO_WORK  # its time says nothing about whole batches
            if by_layer:
                more_tokens, more_ended = self._advance(by_layer)
                tokens, ended = tokens + more_tokens, ended + more_ended
                num_prefilled += sum(chunk.num_tokens for chunk in more_ended)
            expired = self._interruptions.take_expired()
            if not (plans or by_layer or expired):
                return EMPTY_STEP
            step_s, num_decoded = time.perf_counter() - begin_s, len(whole.decoding)
            times = step_s, work, profile.take()
            return StepResult(tuple(tokens), _prefilled(ended), num_prefilled, num_decoded, *times, expired)
        finally:
            profile.take()  # what a step that failed has counted is not the next one's

    def _compute(self, plans: Sequence[BatchPlan]) -> tuple[list[NewToken], tuple[BatchPlan, ...]]:
        """New tokens, and what was left of the plans when they were computed."""
        tokens: list[NewToken] = []
        computed: list[BatchPlan] = []
        try:
            for number, plan in enumerate(plans):
                if number:  # some of it may have ended while the ones before were computed
                    plan, _ = plan.live_part()
                if not plan:
                    continue
                profile.enter(Activity.COMPUTE)
                left, logits = self._runner.run(plan)
                if self._device.type == "cuda":  # else its time would count for whatever comes next
                    torch.cuda.current_stream(self._device).synchronize()  # not for layers that are still on their way
                profile.enter(Activity.SCHEDULING)
                tokens += deliver(self._scheduler, left, logits)
                computed.append(left)
        except LoadFailed:
            self._scheduler.put_back(plans)
            raise
        return tokens, tuple(computed)

    def _advance(self, groups: Sequence[SequenceGroup]) -> tuple[list[NewToken], list[PrefillChunk]]:
        """One layer of prompts that run layer by layer, or their first tokens, and the chunks that ended them."""
        contexts = [context for group in groups for context in group.contexts]
        if not contexts:  # all were cancelled within this step
            return [], []
        profile.enter(Activity.COMPUTE)
        if groups[0].layer < self._num_layers:
            self._runner.run_one_layer(groups, self._token_budget)
            return [], []
        logits = self._runner.end(contexts)
        profile.enter(Activity.SCHEDULING)
        chunks = tuple(PrefillChunk(context, 0, context.num_tokens) for context in contexts)
        return deliver(self._scheduler, BatchPlan((), chunks), logits), list(chunks)

    def _runnable_groups(self) -> tuple[SequenceGroup, ...]:
        return runnable_groups(self._scheduler.by_layer, self._num_layers, self._token_budget, self._can_run)


def _merged(plans: Sequence[BatchPlan]) -> BatchPlan:
    """All that the batches of a step hold; the first alone decodes."""
    return BatchPlan(plans[0].decoding if plans else (), tuple(each for plan in plans for each in plan.chunks))


def _prefilled(ended: Sequence[PrefillChunk]) -> tuple[str, ...]:
    """The groups that have no context left to compute."""
    groups = (chunk.context.group for chunk in ended)
    return tuple(dict.fromkeys(group.spec.group_id for group in groups if not group.contexts))

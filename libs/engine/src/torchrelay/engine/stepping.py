"""One step: choose, compute, deliver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from torchrelay.common.latency_model import NO_WORK
from torchrelay.engine import profile
from torchrelay.engine.core import EMPTY_STEP, LoadFailed, NewToken, StepResult
from torchrelay.engine.delivery import deliver
from torchrelay.engine.interruptions import Interruptions
from torchrelay.engine.profile import Share
from torchrelay.engine.runner import Runner, next_up
from torchrelay.engine.scheduling import BatchScheduler
from torchrelay.engine.sequences import Chunk, Group, Plan
from torchrelay.engine.work import work_of


class Stepper:
    """The loop of an instance, a turn at a time. ``can_run`` tells whether a layer, or the head, could compute now."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        runner: Runner,
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
        return self._scheduler.has_work or bool(self._next_up())

    def step(self) -> StepResult:
        """As ``Instance.step``."""
        begin_s = time.perf_counter()
        profile.enter(Share.SCHEDULING)
        try:
            self._interruptions.settle()
            plans, by_layer = self._scheduler.plan(), self._next_up()
            work = work_of(_whole(plans))
            tokens, computed = self._compute(plans)
            whole = _whole(computed)
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

    def _compute(self, plans: Sequence[Plan]) -> tuple[list[NewToken], tuple[Plan, ...]]:
        """New tokens, and what was left of the plans when they were computed."""
        tokens: list[NewToken] = []
        computed: list[Plan] = []
        try:
            for number, plan in enumerate(plans):
                if number:  # some of it may have ended while the ones before were computed
                    plan, _ = plan.living()
                if not plan:
                    continue
                profile.enter(Share.COMPUTE)
                left, logits = self._runner.run(plan)
                if self._device.type == "cuda":  # else its time would count for whatever comes next
                    torch.cuda.current_stream(self._device).synchronize()  # not for layers that are still on their way
                profile.enter(Share.SCHEDULING)
                tokens += deliver(self._scheduler, left, logits)
                computed.append(left)
        except LoadFailed:
            self._scheduler.put_back(plans)
            raise
        return tokens, tuple(computed)

    def _advance(self, groups: Sequence[Group]) -> tuple[list[NewToken], list[Chunk]]:
        """One layer of prompts that run layer by layer, or their first tokens, and the chunks that ended them."""
        contexts = [context for group in groups for context in group.contexts]
        if not contexts:  # all were cancelled within this step
            return [], []
        profile.enter(Share.COMPUTE)
        if groups[0].layer < self._num_layers:
            self._runner.run_one_layer(groups, self._token_budget)
            return [], []
        logits = self._runner.end(contexts)
        profile.enter(Share.SCHEDULING)
        chunks = tuple(Chunk(context, 0, context.num_tokens) for context in contexts)
        return deliver(self._scheduler, Plan((), chunks), logits), list(chunks)

    def _next_up(self) -> tuple[Group, ...]:
        return next_up(self._scheduler.by_layer, self._num_layers, self._token_budget, self._can_run)


def _whole(plans: Sequence[Plan]) -> Plan:
    """All that the batches of a step hold; the first alone decodes."""
    return Plan(plans[0].decoding if plans else (), tuple(each for plan in plans for each in plan.chunks))


def _prefilled(ended: Sequence[Chunk]) -> tuple[str, ...]:
    """The groups that have no context left to compute."""
    groups = (chunk.context.group for chunk in ended)
    return tuple(dict.fromkeys(group.spec.group_id for group in groups if not group.contexts))

"""How long a model's steps take on one device: learned by its worker, used for predictions by the scheduler; no torch.

A step computes positions, and each attends to all positions up to its own. Prefill steps and decode-only steps have a
linear cost each:

    step = base + per_position * positions + per_attended * attended

``base`` is the fixed cost of a step (mostly reading the weights), ``per_position`` that of the linear layers,
``per_attended`` that of attention. DistServe (OSDI 2024), appendix A, has the same form for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from torchrelay.common.latency.online_fit import OnlineFit

# Initial proportions: a prefilled position costs a 16th of the base and twice that at a context of 4,096; eight choices
# decode in twice the base time, and attending to 8,192 positions adds the base time again.
_PREFILL_SHAPE = (1.0, 1 / 16, 1 / 65536)
_DECODE_SHAPE = (1.0, 1 / 8, 1 / 8192)


def attended_positions(begin: int, end: int) -> int:
    """Positions attended to by the positions [begin, end) of one sequence, each including itself."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


@dataclass(frozen=True, slots=True)
class StepWork:
    """Positions that a step computes."""

    num_prefilled: int = 0  # prompt positions
    num_prefill_attended: int = 0
    num_decoding: int = 0  # choices, one position each
    num_decode_attended: int = 0


NO_WORK: Final = StepWork()


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step in seconds; no part is negative."""

    base_s: float = 0.0
    per_position_s: float = 0.0
    per_attended_s: float = 0.0
    num_steps: int = 0  # observed; 0: unknown
    error: float = 0.0  # mean of |measured - predicted| / predicted recently, each at most 1

    @property
    def known(self) -> bool:
        return self.num_steps > 0

    def marginal_s(self, num_positions: float, num_attended: float) -> float:
        """Time that these positions add to a step that runs anyway."""
        return self.per_position_s * num_positions + self.per_attended_s * num_attended

    def step_s(self, num_positions: float, num_attended: float) -> float:
        return self.base_s + self.marginal_s(num_positions, num_attended)

    def slower(self, factor: float) -> StepCost:
        """The cost of a device that takes ``factor`` times as long."""
        return replace(
            self,
            base_s=self.base_s * factor,
            per_position_s=self.per_position_s * factor,
            per_attended_s=self.per_attended_s * factor,
        )


UNKNOWN: Final = StepCost()


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Costs of one model on one device. ``token_budget``: positions per step; longer prompts take several."""

    prefill: StepCost = UNKNOWN
    decode: StepCost = UNKNOWN
    token_budget: int = 512

    def prefill_s(
        self, num_tokens: int, num_cached: int = 0, num_decoding: int = 0, num_decode_attended: int = 0
    ) -> float:
        """Time to compute a prompt of ``num_tokens``, of which ``num_cached`` are cached.

        ``num_decoding`` choices keep decoding and take their share of each step and its budget.
        """
        # Called for each candidate of each request: no calls where arithmetic will do.
        num_left = num_tokens - num_cached if num_cached < num_tokens else 1
        prefill, budget, fixed_s = self.prefill, self.token_budget, self.prefill.base_s
        if num_decoding or num_decode_attended:
            budget = max(budget - num_decoding, 1)
            fixed_s += self.decode.marginal_s(num_decoding, num_decode_attended)
        begin = num_tokens - num_left
        num_attended = (num_tokens * (num_tokens + 1) - begin * (begin + 1)) // 2
        own_s = prefill.per_position_s * num_left + prefill.per_attended_s * num_attended
        return -(-num_left // budget) * fixed_s + own_s

    def step_s(self, work: StepWork) -> float | None:
        """Time of one step; None if no such step has been observed."""
        cost = self.prefill if work.num_prefilled else self.decode
        if not cost.known:
            return None
        decode_s = self.decode.marginal_s(work.num_decoding, work.num_decode_attended)
        if not work.num_prefilled:
            return cost.base_s + decode_s
        return cost.step_s(work.num_prefilled, work.num_prefill_attended) + decode_s

    def queued_s(self, num_tokens: int, num_attended: int = 0) -> float:
        """Time to compute prompts of ``num_tokens`` in total, in full steps that short ones share."""
        return -(-num_tokens // self.token_budget) * self.prefill.base_s + self.prefill.marginal_s(
            num_tokens, num_attended
        )

    def tbt_s(self, num_decoding: int, num_decode_attended: int) -> float:
        """Time between tokens of a choice in a batch of ``num_decoding``, without concurrent prefill."""
        cost = self.decode
        return cost.base_s + (cost.per_position_s * num_decoding + cost.per_attended_s * num_decode_attended)

    def slower(self, factor: float) -> LatencyModel:
        """The costs of a device that takes ``factor`` times as long."""
        return replace(self, prefill=self.prefill.slower(factor), decode=self.decode.slower(factor))


class LatencyFit:
    """Learns a ``LatencyModel`` from complete steps that did not wait for weights."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._prefill, self._decode = OnlineFit(_PREFILL_SHAPE), OnlineFit(_DECODE_SHAPE)

    @property
    def model(self) -> LatencyModel:
        return LatencyModel(_cost(self._prefill), _cost(self._decode), self._token_budget)

    def observe(self, work: StepWork, step_s: float) -> None:
        """Records a step. In a mixed step the predicted cost of decoding is subtracted first."""
        if step_s <= 0:
            return
        if not work.num_prefilled:
            if work.num_decoding:
                self._decode.observe((1, work.num_decoding, work.num_decode_attended), step_s)
            return
        if work.num_decoding:
            if not self._decode.num_steps:
                return
            step_s -= _cost(self._decode).marginal_s(work.num_decoding, work.num_decode_attended)
        if step_s > 0:
            self._prefill.observe((1, work.num_prefilled, work.num_prefill_attended), step_s)


def _cost(fit: OnlineFit) -> StepCost:
    base_s, per_position_s, per_attended_s = fit.costs
    return StepCost(base_s, per_position_s, per_attended_s, fit.num_steps, fit.error) if fit.num_steps else UNKNOWN

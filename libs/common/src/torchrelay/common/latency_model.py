"""How long a model's steps take on one device: learned by its worker, predicted with by the scheduler; no torch.

A step computes positions, and attention *sees* for each of them all positions up to its own. Steps that prefill and
steps that only decode follow a line of their own:

    step = base + per_position * positions + per_attended * seen

``base`` is what any step costs (above all reading the weights), ``per_position`` the linear layers, ``per_attended``
attention. For the same shape of cost on GPUs see DistServe (OSDI 2024), appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torchrelay.common.online_fit import OnlineFit

# The first guesses, in proportion: a position prefilled costs a 16th of the base and doubles at a context of 4,096;
# eight choices decode in twice the time of none, and reading 8,192 positions takes as long again.
_PREFILL_SHAPE = (1.0, 1 / 16, 1 / 65536)
_DECODE_SHAPE = (1.0, 1 / 8, 1 / 8192)


def attended_positions(begin: int, end: int) -> int:
    """Positions that attention reads for the positions [begin, end) of one sequence: each sees itself too."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes."""

    num_prefilled: int = 0  # positions of prompts
    num_prefill_attended: int = 0
    num_decoding: int = 0  # choices, a position each
    num_decode_attended: int = 0


NO_WORK: Final = StepWork()


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a step takes; no part is negative."""

    base_s: float = 0.0
    per_position_s: float = 0.0
    per_attended_s: float = 0.0
    num_steps: int = 0  # learned from; 0: nothing is known
    error: float = 0.0  # mean of |measured - predicted| / predicted of late, each at most 1

    @property
    def known(self) -> bool:
        return self.num_steps > 0

    def marginal_s(self, num_positions: float, num_attended: float) -> float:
        """What these positions add to a step that is run anyway."""
        return self.per_position_s * num_positions + self.per_attended_s * num_attended

    def step_s(self, num_positions: float, num_attended: float) -> float:
        return self.base_s + self.marginal_s(num_positions, num_attended)


UNKNOWN: Final = StepCost()


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Of one model on one device. ``token_budget``: positions of one step; longer prompts take several."""

    prefill: StepCost = UNKNOWN
    decode: StepCost = UNKNOWN
    token_budget: int = 512

    def prefill_s(
        self, num_tokens: int, num_cached: int = 0, num_decoding: int = 0, num_decode_attended: int = 0
    ) -> float:
        """Until a prompt of ``num_tokens``, of which ``num_cached`` are there, is computed.

        ``num_decoding`` choices go on decoding beside it: they take their part of each step and of its budget.
        """
        num_left = max(num_tokens - num_cached, 1)
        room = max(self.token_budget - num_decoding, 1)
        beside_s = self.decode.marginal_s(num_decoding, num_decode_attended)
        own_s = self.prefill.marginal_s(num_left, attended_positions(num_tokens - num_left, num_tokens))
        return -(-num_left // room) * (self.prefill.base_s + beside_s) + own_s

    def queued_s(self, num_tokens: int, num_attended: int = 0) -> float:
        """Until prompts of so many tokens together are computed, in full steps: short ones share a step."""
        return -(-num_tokens // self.token_budget) * self.prefill.base_s + self.prefill.marginal_s(
            num_tokens, num_attended
        )

    def tbt_s(self, num_decoding: int, num_decode_attended: int) -> float:
        """Between two tokens of a choice, with ``num_decoding`` choices in the batch, nobody prefilling beside."""
        return self.decode.step_s(num_decoding, num_decode_attended)


class LatencyFit:
    """Learns a ``LatencyModel`` from steps. Steps that waited for weights, or ran in part only, are not for it."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._prefill, self._decode = OnlineFit(_PREFILL_SHAPE), OnlineFit(_DECODE_SHAPE)

    @property
    def model(self) -> LatencyModel:
        return LatencyModel(_cost(self._prefill), _cost(self._decode), self._token_budget)

    def observe(self, work: StepWork, step_s: float) -> None:
        """A step took this long. In a step of both kinds, what decoding adds by prediction is taken off first."""
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

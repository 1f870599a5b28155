"""Which running choices compute in the next step: all, unless one tenant's would slow another's too much.

Beside a tenant's own choices, each other tenant of the same weight may lengthen a step by ``MAX_SLOWDOWN`` of the time
that the own ones take alone, as the latency model predicts it. Where all choices together would exceed that, tenants
share the step's time beyond its fixed cost: the choices of whoever wants more than its share take turns. Nobody is held
back to less than what the tenant with the least asks for, or to less than one choice, however long its context is. On a
device where many rows cost little more than one everybody computes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.engine.batching.sequences import DecodeSequence

MAX_SLOWDOWN: Final = 0.5  # a chat is then within twice its time, its other parts being shared as well
_NUM_HALVINGS: Final = 20
_ROUNDING: Final = 1 + 1e-9
Latency = Callable[[], LatencyModel | None]


def no_latency() -> None:
    """Nothing is known of how long steps take."""
    return None


class _TenantRows:
    """A tenant's choices, the first in turn first."""

    def __init__(self, rows: list[DecodeSequence], latency: LatencyModel) -> None:
        cost = latency.decode
        self.rows, self.weight = rows, rows[0].spec.weight
        self._sums_s = list(accumulate(cost.marginal_s(1, each.num_computed + 1) for each in rows))
        self.first_s, self.all_s = self._sums_s[0], self._sums_s[-1]

    def num_within(self, s_per_weight: float) -> int:
        return max(1, bisect_right(self._sums_s, s_per_weight * self.weight * _ROUNDING))

    def time_within(self, s_per_weight: float) -> float:
        return self._sums_s[self.num_within(s_per_weight) - 1]


class DecodeShares:
    """Chooses by the latency model of the moment; while there is none, or it knows no decoding, everybody computes."""

    def __init__(self, latency: Latency = no_latency) -> None:
        self._latency = latency

    def choose(self, decoding: Iterable[DecodeSequence], num_prompt_tokens: int = 0) -> list[DecodeSequence]:
        """``decoding``: the choices whose turn is first come first. ``num_prompt_tokens``: of prompts, in the step."""
        by_tenant: dict[str, list[DecodeSequence]] = {}
        for each in decoding:
            by_tenant.setdefault(each.spec.tenant_id, []).append(each)
        everybody = [each for rows in by_tenant.values() for each in rows]
        latency = self._latency() if len(by_tenant) > 1 else None
        if latency is None or not latency.decode.known:
            return everybody
        tenants = [_TenantRows(rows, latency) for rows in by_tenant.values()]
        fixed_s = latency.decode.base_s
        if num_prompt_tokens and latency.prefill.known:
            fixed_s = latency.prefill.step_s(num_prompt_tokens, 0)
        weight = sum(each.weight for each in tenants)
        limit_s = min((1 + MAX_SLOWDOWN * (weight / each.weight - 1)) * (fixed_s + each.all_s) for each in tenants)
        if fixed_s + sum(each.all_s for each in tenants) <= limit_s:
            return everybody
        fits = max(
            max(each.first_s / each.weight for each in tenants), min(each.all_s / each.weight for each in tenants)
        )
        does_not = max(each.all_s / each.weight for each in tenants)
        for _ in range(_NUM_HALVINGS):
            between = (fits + does_not) / 2
            if fixed_s + sum(each.time_within(between) for each in tenants) <= limit_s:
                fits = between
            else:
                does_not = between
        return [row for each in tenants for row in each.rows[: each.num_within(fits)]]

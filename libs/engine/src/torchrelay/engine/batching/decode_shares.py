"""The running choices that compute in the next step: all, unless one tenant's would slow another's too much.

Beside a tenant's own choices, each other tenant may lengthen a step by ``MAX_SLOWDOWN`` of the time that the tenant's
own choices take alone, as the latency model predicts it. Where all choices together would exceed that, tenants share
the step's time beyond its fixed cost, and the choices of a tenant that wants more than its share take turns. No tenant
is limited to less than what the least demanding tenant asks for, or to less than one choice, however long its context
is. On a device where many rows cost little more than one row, all choices compute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.engine.batching.sequences import DecodeSequence

MAX_SLOWDOWN: Final = 0.5  # a chat is then within twice its time, because its other parts are shared as well
_NUM_HALVINGS: Final = 20
_ROUNDING: Final = 1 + 1e-9
Latency = Callable[[], LatencyModel | None]


def no_latency() -> None:
    """No latency model: nothing is known of how long steps take."""
    return None


class _TenantRows:
    """A tenant's choices in the order of their turns, and the time that the first n of them take."""

    def __init__(self, rows: list[DecodeSequence], latency: LatencyModel) -> None:
        self.rows = rows
        self._sums_s = list(accumulate(latency.decode.marginal_s(1, each.num_computed + 1) for each in rows))
        self.first_s, self.all_s = self._sums_s[0], self._sums_s[-1]

    def num_within(self, share_s: float) -> int:
        return max(1, bisect_right(self._sums_s, share_s * _ROUNDING))

    def time_within(self, share_s: float) -> float:
        return self._sums_s[self.num_within(share_s) - 1]


def choices_to_decode(
    decoding: Iterable[DecodeSequence], latency: Latency, num_prompt_tokens: int
) -> list[DecodeSequence]:
    """The choices of the next step out of ``decoding``, which lists them in the order of their turns.

    ``num_prompt_tokens`` of prompts are computed in the same step. Without a model of decode steps all choices compute.
    """
    by_tenant: dict[str, list[DecodeSequence]] = {}
    for each in decoding:
        by_tenant.setdefault(each.spec.tenant_id, []).append(each)
    all_rows = [each for rows in by_tenant.values() for each in rows]
    model = latency() if len(by_tenant) > 1 else None
    if model is None or not model.decode.known:
        return all_rows
    tenants = [_TenantRows(rows, model) for rows in by_tenant.values()]
    fixed_s = model.decode.base_s
    if num_prompt_tokens and model.prefill.known:
        fixed_s = model.prefill.step_s(num_prompt_tokens, 0)
    least_s, most_s = min(each.all_s for each in tenants), max(each.all_s for each in tenants)
    limit_s = (1 + MAX_SLOWDOWN * (len(tenants) - 1)) * (fixed_s + least_s)
    if fixed_s + sum(each.all_s for each in tenants) <= limit_s:
        return all_rows
    # The largest share with which the step keeps the limit, by bisection.
    fits, exceeds = max(least_s, *(each.first_s for each in tenants)), most_s
    for _ in range(_NUM_HALVINGS):
        between = (fits + exceeds) / 2
        if fixed_s + sum(each.time_within(between) for each in tenants) <= limit_s:
            fits = between
        else:
            exceeds = between
    return [row for each in tenants for row in each.rows[: each.num_within(fits)]]

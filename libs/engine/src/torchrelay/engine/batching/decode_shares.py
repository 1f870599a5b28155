"""Which running choices compute in the next step: all, unless one tenant's would slow another's too much.

Beside a tenant's own choices, each other tenant of the same weight may lengthen a step by ``MAX_SLOWDOWN`` of the time
that the own ones take alone, as the latency model predicts it; but nobody is held back to fewer choices than another
has. On a device where many rows cost little more than one everybody computes; elsewhere the choices of whoever has many
take turns. It is processor sharing between tenants, but kinder to those with few choices, as the fixed cost of a step
is paid once for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.engine.batching.sequences import DecodeSequence

MAX_SLOWDOWN: Final = 0.5  # a chat is then within twice its time, its other parts being shared as well
Latency = Callable[[], LatencyModel | None]


def no_latency() -> None:
    """Nothing is known of how long steps take."""
    return None


class DecodeShares:
    """Chooses by the latency model of the moment; while there is none, or it knows no decoding, everybody computes."""

    def __init__(self, latency: Latency = no_latency) -> None:
        self._latency = latency

    def choose(self, decoding: Iterable[DecodeSequence]) -> list[DecodeSequence]:
        """``decoding``: the choices whose turn is first come first. One of each tenant at least is chosen."""
        by_tenant: dict[str, list[DecodeSequence]] = {}
        for each in decoding:
            by_tenant.setdefault(each.spec.tenant_id, []).append(each)
        tenants = list(by_tenant.values())
        everybody = [each for rows in tenants for each in rows]
        if len(tenants) < 2 or (latency := self._latency()) is None or not latency.decode.known:
            return everybody

        def step_s(rows: Sequence[DecodeSequence]) -> float:
            return latency.tbt_s(len(rows), sum(each.num_computed + 1 for each in rows))

        total_weight = sum(rows[0].spec.weight for rows in tenants)
        limit_s = min((1 + MAX_SLOWDOWN * (total_weight / rows[0].spec.weight - 1)) * step_s(rows) for rows in tenants)
        if step_s(everybody) <= limit_s:
            return everybody
        per_weight = [len(rows) / rows[0].spec.weight for rows in tenants]
        fits, does_not = max(1, math.floor(min(per_weight))), math.ceil(max(per_weight))
        while does_not - fits > 1:
            between = (fits + does_not) // 2
            if step_s(_first_of(tenants, between)) <= limit_s:
                fits = between
            else:
                does_not = between
        return _first_of(tenants, fits)


def _first_of(tenants: Iterable[Sequence[DecodeSequence]], num_rows: int) -> list[DecodeSequence]:
    """Of each tenant its first ``num_rows`` per unit of weight, and one at least."""
    return [each for rows in tenants for each in rows[: max(1, int(num_rows * rows[0].spec.weight))]]

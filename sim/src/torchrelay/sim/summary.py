"""Cost and attainment of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrelay.sim.scenario import RequestOutcome, ServedModel
from torchrelay.sim.spent import Spent


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of an hour, in any currency. The defaults are near the dollar prices of rented machines."""

    device_hour: float = 2.5
    ram_gb_hour: float = 0.005


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of all requests. A refused or unfinished request misses its objective, and its times are infinite."""

    num_requests: int
    num_refused: int
    attainment: float  # share of requests that met both objectives
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    device_s: float  # from a load order until the slot is free again, summed over devices
    ram_byte_s: float
    num_loads: int

    def cost(self, prices: Prices) -> float:
        return (self.device_s * prices.device_hour + self.ram_byte_s / 1e9 * prices.ram_gb_hour) / 3600


def summarize(outcomes: Sequence[RequestOutcome], models: Mapping[str, ServedModel], spent: Spent) -> Summary:
    """Raises ``ValueError`` without a request."""
    if not outcomes:
        raise ValueError("there was no request")
    ttfts = [outcome.ttft_s for outcome in outcomes]
    return Summary(
        num_requests=len(outcomes),
        num_refused=sum(outcome.is_refused for outcome in outcomes),
        attainment=sum(outcome.attains(models[outcome.request.model]) for outcome in outcomes) / len(outcomes),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p95_s=percentile(ttfts, 95),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile([outcome.tpot_s for outcome in outcomes], 50),
        device_s=spent.device_s,
        ram_byte_s=spent.ram_byte_s,
        num_loads=spent.num_loads,
    )


def percentile(values: Iterable[float], percent: int) -> float:
    """The smallest value that ``percent`` of all values do not exceed; values may be infinite."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]

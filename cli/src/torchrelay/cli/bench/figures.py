"""Figures of a load. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrelay.cli.bench.answered import Answered
from torchrelay.cli.bench.cold_starts import Phases, is_cold, phase_seconds
from torchrelay.cli.bench.targets import Targets
from torchrelay.sim.summary import percentile


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles, in seconds."""

    p50: float
    p90: float
    p99: float


def spread_of(values: Iterable[float]) -> Spread | None:
    """None without values."""
    ordered = sorted(values)
    return Spread(*(percentile(ordered, percent) for percent in (50, 90, 99))) if ordered else None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that a client alone can measure."""

    seconds: float  # from the load's begin to the last end of a request
    num_completed: int
    num_failed: int
    num_met: int  # both targets
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: Spread | None
    tbt_s: Spread | None  # over all gaps between tokens
    tpot_s: Spread | None  # over the means of the requests
    late_s: float  # how late the client sent a request, at most
    errors: dict[str, int]

    @property
    def num_requests(self) -> int:
        return self.num_completed + self.num_failed

    @property
    def attainment(self) -> float:
        """Share of all requests that met both targets; failed ones did not."""
        return self.num_met / self.num_requests

    @property
    def goodput_per_s(self) -> float:
        return self.num_met / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_needed(self) -> int:
        """Positions that had to be computed: prefill gives the first token of an answer."""
        return self.num_tokens - self.num_cached_tokens - self.num_completed


def figures_of(answered: Sequence[Answered], targets: Targets) -> Figures:
    """Raises ``ValueError`` without a request that ended."""
    if not answered:
        raise ValueError("no request has ended")
    completed = [each for each in answered if not each.error]
    return Figures(
        seconds=max(each.ended_s for each in answered),
        num_completed=len(completed),
        num_failed=len(answered) - len(completed),
        num_met=sum(_meets(each, targets) for each in completed),
        num_prompt_tokens=sum(each.num_prompt_tokens for each in completed),
        num_cached_tokens=sum(each.num_cached_tokens for each in completed),
        num_output_tokens=sum(each.num_output_tokens for each in completed),
        ttft_s=spread_of(each.ttft_s for each in completed if each.ttft_s is not None),
        tbt_s=spread_of(gap for each in completed for gap in each.gaps_s),
        tpot_s=spread_of(each.tpot_s for each in completed if each.num_output_tokens > 1),
        late_s=max(each.sent_s - each.due_s for each in answered),
        errors=dict(Counter(each.error for each in answered if each.error).most_common()),
    )


def _meets(answered: Answered, targets: Targets) -> bool:
    return answered.ttft_s is not None and answered.ttft_s <= targets.ttft_s and answered.tpot_s <= targets.tpot_s


@dataclass(frozen=True, slots=True)
class Held:
    """Devices of the model during the load, and the positions that they computed, for whomever."""

    device_s: float
    most_devices: int
    num_computed: int

    def token_goodput(self, figures: Figures) -> float | None:
        """Tokens that reached callers over tokens computed; None if nothing was seen of the computation."""
        return min(figures.num_needed / self.num_computed, 1.0) if self.num_computed else None


@dataclass(frozen=True, slots=True)
class Cold:
    """Requests that waited for a load, among those that the platform explains."""

    num_explained: int
    num_cold: int
    phases_s: dict[str, Spread]


def cold_of(explanations: Sequence[Phases]) -> Cold:
    cold = [phase_seconds(phases) for phases in explanations if is_cold(phases)]
    names = dict.fromkeys(name for phases in cold for name in phases)
    spreads = {name: spread_of(phases[name] for phases in cold if name in phases) for name in names}
    return Cold(len(explanations), len(cold), {name: spread for name, spread in spreads.items() if spread})


def bill_dollars(figures: Figures, price: Mapping[str, Any]) -> float:
    """The price of the completed requests by a row of the price list."""
    num_new = figures.num_prompt_tokens - figures.num_cached_tokens
    nano = num_new * price["prompt_nano"] + figures.num_cached_tokens * price["cached_nano"]
    return float(nano + figures.num_output_tokens * price["output_nano"]) / 1e9


def per_million(dollars: float, figures: Figures) -> float | None:
    """Dollars per million tokens, prompts included; None without tokens."""
    return dollars / figures.num_tokens * 1e6 if figures.num_tokens else None

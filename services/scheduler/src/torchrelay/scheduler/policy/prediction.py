"""What is foretold of an attempt when it is placed, and what of it was measured in the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torchrelay.common.latency_model import LatencyModel
from torchrelay.scheduler.policy.timed_phase import TimedPhase


@dataclass(frozen=True)
class Prediction:
    """Seconds from the placement on; all 0 for an attempt that an earlier scheduler placed."""

    ttft_s: float = 0.0
    prefill_s: float = 0.0  # the part of it that is its own prompt
    tbt_s: float = 0.0
    num_cached_tokens: int = 0  # of the prompt, thought to be there already


UNPREDICTED: Final = Prediction()


@dataclass(frozen=True)
class Outcome:
    """What a gateway and its workers measured of an attempt; None: it did not come to that."""

    ttft_s: float | None = None  # from the placement on
    tbt_s: float | None = None  # mean
    kv_transfer_s: float | None = None  # from the end of prefill until the decode worker had the KV
    ended_at: float = 0.0  # when its last token came; 0: none came


def outcome_of(phases: Iterable[TimedPhase], num_output_tokens: int, num_choices: int) -> Outcome:
    """From the phases that a release brings. Prefill and KV are told by two hosts' clocks."""
    by_name = {phase.name: phase for phase in phases}
    first, decode = by_name.get("first_token"), by_name.get("decode")
    prefill, kv = by_name.get("prefill"), by_name.get("kv")
    num_steps = num_output_tokens / max(num_choices, 1) - 1
    return Outcome(
        ttft_s=first.duration_s if first else None,
        tbt_s=decode.duration_s / num_steps if decode and num_steps > 0 else None,
        kv_transfer_s=max(kv.end_us - prefill.end_us, 0) / 1e6 if prefill and kv else None,
        ended_at=decode.end_us / 1e6 if decode else 0.0,
    )


def queue_s(latency: LatencyModel, num_tokens: int, reported_s: float, placed: Iterable[Prediction]) -> float:
    """How long the prompts before another one take: reported by the worker, and placed since its report.

    A worker that has no model of its own yet reports tokens alone.
    """
    if not reported_s and num_tokens:
        reported_s = latency.queued_s(num_tokens)
    return reported_s + sum(each.prefill_s for each in placed)

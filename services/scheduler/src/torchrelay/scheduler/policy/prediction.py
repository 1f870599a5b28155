"""Latency of an attempt: predicted when it is placed, measured when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from torchrelay.scheduler.policy.timed_phase import TimedPhase


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """Predicted seconds from the placement on. Of an attempt that an earlier scheduler placed, only ``prefill_s`` is
    predicted again, and all others are 0.
    """

    ttft_s: float = 0.0
    prefill_s: float = 0.0  # the part of ``ttft_s`` for the attempt's own prompt
    tbt_s: float = 0.0
    step_s: float = 0.0  # a decode step with the batch at placement
    num_cached_tokens: int = 0  # tokens of the prompt that are expected to be cached
    ttft_correction: float = 1.0  # the prefill instance's factor at placement, which is part of ``ttft_s``
    tbt_correction: float = 1.0  # the decode instance's factor, which is part of ``tbt_s``
    pause_s: float = 0.0  # pause without prompts after this one, so that the instance's answers meet their token times


UNPREDICTED: Final = Prediction()


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """Measurements of an attempt by its gateway and workers; None if the attempt did not get that far."""

    ttft_s: float | None = None  # from the placement on
    tbt_s: float | None = None  # mean
    kv_transfer_s: float | None = None  # from the end of prefill until the decode worker has the KV
    ended_at: float = 0.0  # when its last token arrived; 0: none did
    num_output_tokens: int = 0  # of all choices


def outcome_of(phases: Iterable[TimedPhase], num_output_tokens: int, num_choices: int) -> Outcome:
    """The outcome from the phases that a release reports."""
    by_name = {phase.name: phase for phase in phases}
    first, decode = by_name.get("first_token"), by_name.get("decode")
    prefill, kv = by_name.get("prefill"), by_name.get("kv")
    num_steps = num_output_tokens / max(num_choices, 1) - 1
    return Outcome(
        ttft_s=first.duration_s if first else None,
        tbt_s=decode.duration_s / num_steps if decode and num_steps > 0 else None,
        # The hosts' clocks differ, so only durations are compared. KV is offered when prefill begins.
        kv_transfer_s=max(kv.duration_s - prefill.duration_s, 0.0) if prefill and kv else None,
        ended_at=decode.end_us / 1e6 if decode else 0.0,
        num_output_tokens=num_output_tokens,
    )

"""How much a plan computes: what the time of its step is explained by."""

from __future__ import annotations

from torchrelay.common.latency_model import StepWork, attended_positions
from torchrelay.engine.batching.sequences import BatchPlan


def work_of(plan: BatchPlan) -> StepWork:
    """To be asked before the sequences are moved on."""
    return StepWork(
        num_prefilled=sum(chunk.num_tokens for chunk in plan.chunks),
        num_prefill_attended=sum(attended_positions(chunk.begin, chunk.end) for chunk in plan.chunks),
        num_decoding=len(plan.decoding),
        num_decode_attended=sum(each.num_computed + 1 for each in plan.decoding),
    )

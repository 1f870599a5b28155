"""How much a plan computes: what the time of its step is explained by."""

from __future__ import annotations

from torchrelay.common.latency_model import StepWork, seen_by
from torchrelay.engine.sequences import Plan


def work_of(plan: Plan) -> StepWork:
    """To be asked before the sequences are moved on."""
    return StepWork(
        num_prefilled=sum(chunk.num_tokens for chunk in plan.chunks),
        num_prefill_seen=sum(seen_by(chunk.begin, chunk.end) for chunk in plan.chunks),
        num_decoding=len(plan.decoding),
        num_decode_seen=sum(each.num_computed + 1 for each in plan.decoding),
    )

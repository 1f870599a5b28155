"""The load of simulated clusters: how often each arrival of a trace must happen to use half of a fleet."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.sim.scenario import Fleet, ServedModel
from torchrelay.sim.traces import Arrival

ZIPF = 1.0
_USE = 0.5  # of the slots of the scarcest size
_BATCH = 16  # sequences that an instance decodes at once


def copies_for(fleet: Fleet, models: Sequence[ServedModel], arrivals: Sequence[Arrival], seconds: float) -> float:
    """Repetitions of each arrival with which prompts and answers occupy ``_USE`` of the scarcest slots."""
    weights = [1 / rank**ZIPF for rank in range(1, len(models) + 1)]
    num_prompt_tokens = sum(arrival.num_prompt_tokens for arrival in arrivals)
    num_output_tokens = sum(arrival.num_output_tokens for arrival in arrivals)
    taken_s: dict[int, float] = {}
    for model, weight in zip(models, weights, strict=True):
        token_s = model.latency.tbt_s(_BATCH, 1000 * _BATCH) / _BATCH
        work_s = num_prompt_tokens / model.prefill_tokens_per_s + num_output_tokens * token_s
        taken_s[model.num_devices] = taken_s.get(model.num_devices, 0.0) + weight / sum(weights) * work_s
    return min(_USE * seconds * fleet.num_hosts * fleet.groups.count(size) / work_s for size, work_s in taken_s.items())

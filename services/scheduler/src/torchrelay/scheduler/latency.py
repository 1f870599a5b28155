"""Predictions: how long a prompt, a step, a load still take. Measured rates where there are any, defaults before."""

from __future__ import annotations

from torchrelay.scheduler.core import Instance, Phase, Tier, Worker
from torchrelay.scheduler.rules import Rules


def prefill_tokens_per_s(worker: Worker, rules: Rules) -> float:
    return worker.prefill_tokens_per_s or rules.default_prefill_tokens_per_s


def step_s(worker: Worker, rules: Rules) -> float:
    """Median decode step."""
    return worker.step_s or rules.default_step_s


def load_s(pack_bytes: int, tier: Tier, rules: Rules) -> float:
    """From an empty slot to all layers ready."""
    rate = rules.map_bytes_per_s if tier is Tier.HOST else rules.relay_bytes_per_s
    return rules.slot_setup_s + pack_bytes / rate


def load_left_s(instance: Instance, whole_load_s: float, now: float) -> float:
    """Time until all layers are there; extrapolated from the layers that are, once there are any."""
    if instance.phase is not Phase.LOADING:
        return 0.0
    elapsed_s = max(now - instance.created_at, 0.0)
    if instance.num_layers_ready:
        return elapsed_s * (instance.num_layers - instance.num_layers_ready) / instance.num_layers_ready
    return max(whole_load_s - elapsed_s, _least_left_s(whole_load_s))


def _least_left_s(whole_load_s: float) -> float:
    """A load that is overdue is still not done: at least a tenth of it is taken as left."""
    return whole_load_s / 10

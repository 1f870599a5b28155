"""BlitzScale (Zhang et al., OSDI 2025), with a minimum of zero or one instance of each model.

Modelled: its variant in which an instance both prefills and decodes; immediate scaling by the number of requests;
weights over serial chains of hosts; one copy of each model in the RAM of the cluster. Not modelled: live scaling, in
which a loading instance computes its first layers for an overloaded instance; multicast between the devices of a host;
the variant with separate prefill and decode, which needs more slots than these clusters have. Requests are placed and
bound by our own prediction and wait by deadline (``deadline_order``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.rivals.count_scaling import CountScaling
from bench.rivals.deadline_order import by_deadline
from bench.rivals.relay_plans import by_chain
from torchrelay.scheduler.policy.strategies import LoadingPrompts, Strategies
from torchrelay.sim.plant import policy_model
from torchrelay.sim.scenario import Fleet, Request, ServedModel
from torchrelay.sim.setup import Knobs, Setup, one_copy_each


def blitzscale(
    fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request], *, min_instances: int
) -> Setup:
    kept = [policy_model(model) for model in models] if min_instances else []
    strategies = by_deadline(
        Strategies(
            decide=CountScaling(knobs.requests_per_instance, kept), plan=by_chain, loading_prompts=LoadingPrompts.KEPT
        )
    )
    return Setup(replace(knobs.config(), recent_copies=1), fleet, strategies, one_copy_each(fleet, models))

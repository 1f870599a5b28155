"""ServerlessLLM (Fu et al., OSDI 2024).

Modelled: instances that both prefill and decode, by the number of requests; a keep-alive time; loads where the pack is
nearest, in the host's RAM before its disk; packs stay in RAM until their space is needed. Not modelled: live migration
to free the nearest host, and its loader, which is assumed to be as fast as ours. Requests are placed and bound by our
own prediction and wait by deadline (``deadline_order``), which favours it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.rivals.count_scaling import CountScaling
from bench.rivals.deadline_order import by_deadline
from bench.rivals.relay_plans import from_disk, no_copies
from torchrelay.scheduler.policy.strategies import LoadingPrompts, Strategies
from torchrelay.sim.scenario import Fleet, Request, ServedModel
from torchrelay.sim.setup import Knobs, Setup, one_copy_each


def strategies(knobs: Knobs) -> Strategies:
    decide = CountScaling(knobs.requests_per_instance)
    return by_deadline(
        Strategies(decide=decide, plan=from_disk, evaluate_packs=no_copies, loading_prompts=LoadingPrompts.KEPT)
    )


def serverlessllm(fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request]) -> Setup:
    return Setup(knobs.config(), fleet, strategies(knobs), one_copy_each(fleet, models))

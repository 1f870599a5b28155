"""AllCache, a baseline of BlitzScale's authors: the RAM of every host holds every model's weights, however large.

Modelled: ServerlessLLM's decisions without cache misses; the RAM is counted. Not modelled: hosts with too little RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.sim.policies.serverlessllm import strategies
from torchrelay.sim.policies.setup import Knobs, Setup, all_everywhere
from torchrelay.sim.scenario import Fleet, Request, ServedModel


def all_cache(fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request]) -> Setup:
    large, held = all_everywhere(fleet, models)
    return Setup(knobs.config(), large, strategies(knobs), held)

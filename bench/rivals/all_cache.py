"""AllCache, a baseline of BlitzScale's authors: the RAM of every host holds every model's weights, however large.

Modelled: ServerlessLLM's decisions without cache misses; the RAM is counted. Not modelled: hosts with too little RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.rivals.first_copies import all_everywhere
from bench.rivals.serverlessllm import strategies
from torchrelay.sim.scenario import Fleet, Request, ServedModel
from torchrelay.sim.setup import Knobs, Setup


def all_cache(fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request]) -> Setup:
    large, held = all_everywhere(fleet, models)
    return Setup(knobs.config(), large, strategies(knobs), held)

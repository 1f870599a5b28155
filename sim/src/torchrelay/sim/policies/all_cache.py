"""AllCache, as BlitzScale's authors compare with: every model's weights in the RAM of every host, however much that is.

Modelled: ServerlessLLM's decisions, none of its misses; the RAM is counted. Not modelled: hosts whose RAM is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrelay.sim.policies.serverlessllm import strategies
from torchrelay.sim.policies.setup import Knobs, Setup, all_everywhere
from torchrelay.sim.scenario import Fleet, Request, ServedModel


def all_cache(fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request]) -> Setup:
    large = replace(fleet, arena_bytes=max(fleet.arena_bytes, sum(model.pack_bytes for model in models)))
    return Setup(knobs.config(), large, strategies(knobs), all_everywhere(large, models))

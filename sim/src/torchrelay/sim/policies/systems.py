"""All systems by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torchrelay.sim.policies.all_cache import all_cache
from torchrelay.sim.policies.blitzscale import blitzscale
from torchrelay.sim.policies.distserve import distserve
from torchrelay.sim.policies.serverlessllm import serverlessllm
from torchrelay.sim.policies.setup import System, ours

SYSTEMS: Mapping[str, System] = {
    "ours": ours,
    "serverlessllm": serverlessllm,
    "blitzscale_min1": partial(blitzscale, min_instances=1),
    "blitzscale_min0": partial(blitzscale, min_instances=0),
    "distserve_peak": partial(distserve, is_peak=True),
    "distserve_mean": partial(distserve, is_peak=False),
    "all_cache": all_cache,
}

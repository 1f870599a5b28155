"""All systems by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bench.rivals.all_cache import all_cache
from bench.rivals.blitzscale import blitzscale
from bench.rivals.distserve import distserve
from bench.rivals.serverlessllm import serverlessllm
from torchrelay.sim.setup import System, ours

SYSTEMS: Mapping[str, System] = {
    "ours": ours,
    "serverlessllm": serverlessllm,
    "blitzscale_min1": partial(blitzscale, min_instances=1),
    "blitzscale_min0": partial(blitzscale, min_instances=0),
    "distserve_peak": partial(distserve, is_peak=True),
    "distserve_mean": partial(distserve, is_peak=False),
    "all_cache": all_cache,
}

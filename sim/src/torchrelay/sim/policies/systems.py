"""All systems by name."""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.sim.policies.all_cache import all_cache
from torchrelay.sim.policies.blitzscale import blitzscale_min0, blitzscale_min1
from torchrelay.sim.policies.clairvoyant import clairvoyant
from torchrelay.sim.policies.distserve import distserve_mean, distserve_peak
from torchrelay.sim.policies.serverlessllm import serverlessllm
from torchrelay.sim.policies.setup import System, ours

SYSTEMS: Mapping[str, System] = {
    "ours": ours,
    "serverlessllm": serverlessllm,
    "blitzscale_min1": blitzscale_min1,
    "blitzscale_min0": blitzscale_min0,
    "distserve_peak": distserve_peak,
    "distserve_mean": distserve_mean,
    "all_cache": all_cache,
    "clairvoyant": clairvoyant,
}

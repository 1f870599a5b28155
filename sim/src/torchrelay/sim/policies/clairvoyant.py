"""A bound on what devices can be had for: loads take no time, so that nothing is held for what may come.

Modelled: packs in every host's RAM and devices that take them at once; an instance for each model with open requests,
by their number, drained as soon as it is idle. Where a load takes no time, to know the trace adds nothing but which of
several busy models should get a slot: that is by the longest wait, and is not looked for. So it is near the least
device time, not proven to be it. Requests wait in the order of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.sim.policies.all_cache import all_cache
from torchrelay.sim.policies.setup import Knobs, Setup
from torchrelay.sim.scenario import Fleet, Request, ServedModel

_AT_ONCE_S = 0.1  # the policy's tick
_BYTES_PER_S = 1e18


def clairvoyant(fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request]) -> Setup:
    found = all_cache(replace(fleet, device_bytes_per_s=_BYTES_PER_S), models, knobs, tuned_on)
    ours, theirs = Strategies(), found.strategies
    return replace(
        found,
        config=replace(found.config, idle_timeout_s=_AT_ONCE_S, whole_scale_every_s=_AT_ONCE_S, slot_setup_s=0.0),
        strategies=replace(theirs, choose_late=ours.choose_late, late_rank=ours.late_rank),
    )

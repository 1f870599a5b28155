"""An estimate of the least device time: loads take no time, so no instance is held for future requests.

Modelled: every pack in every host's RAM, and devices that load it instantly; instances by the number of open requests,
drained as soon as they are idle. With instant loads, knowledge of the trace would only help to choose which of several
busy models gets a slot; here the longest wait decides, without a search. So the device time is near the minimum but not
proven to be it. Requests wait in the order of our own scheduler.
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
    cached = all_cache(replace(fleet, device_bytes_per_s=_BYTES_PER_S), models, knobs, tuned_on)
    ours, theirs = Strategies(), cached.strategies
    return replace(
        cached,
        config=replace(cached.config, idle_timeout_s=_AT_ONCE_S, whole_scale_every_s=_AT_ONCE_S, slot_setup_s=0.0),
        strategies=replace(theirs, choose_late=ours.choose_late, late_rank=ours.late_rank),
    )

"""A system on a cluster: its strategies, its parameters and its first copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.scenario import Fleet, Request, ServedModel


@dataclass(frozen=True, slots=True)
class Knobs:
    """Parameters that are tuned: of ours, what a late request costs; of the others, how long an idle instance stays and
    how many requests justify another.
    """

    idle_timeout_s: float = 0.0  # of ours: 0, computed
    requests_per_instance: int = 16
    late_cost_s: float = 60.0

    def config(self) -> PolicyConfig:
        return PolicyConfig(idle_timeout_s=self.idle_timeout_s, late_cost_s=self.late_cost_s)


@dataclass(frozen=True)
class Setup:
    """A system to simulate. ``held``: packs in a host's RAM at the start, by the host's number."""

    config: PolicyConfig
    fleet: Fleet
    strategies: Strategies = field(default_factory=Strategies)
    held: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def plant(self, models: Sequence[ServedModel], *, is_coarse: bool = False) -> Plant:
        ids = count()
        policy = Policy(self.config, lambda: f"instance-{next(ids)}", START_S, self.strategies)
        return Plant(policy, self.fleet, models, held=self.held, is_coarse=is_coarse)


# From the cluster, the models, the tuned parameters and the requests that the system is tuned on.
System: TypeAlias = Callable[[Fleet, Sequence[ServedModel], Knobs, Sequence[Request]], Setup]


def ours(fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request]) -> Setup:
    """Our scheduler with its own strategies; nothing is modelled."""
    return Setup(knobs.config(), fleet, held=one_copy_each(fleet, models))


def one_copy_each(fleet: Fleet, models: Sequence[ServedModel]) -> dict[int, list[str]]:
    """Places a copy of each pack that fits into the cluster's RAM, largest first, on the host with most space."""
    held: dict[int, list[str]] = {number: [] for number in range(fleet.num_hosts)}
    left = dict.fromkeys(held, fleet.arena_bytes)
    for model in sorted(models, key=lambda model: (-model.pack_bytes, model.name)):
        number = max(left, key=lambda number: (left[number], -number))
        if left[number] >= model.pack_bytes:
            left[number] -= model.pack_bytes
            held[number].append(model.name)
    return held

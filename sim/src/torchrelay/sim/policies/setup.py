"""A system on a cluster: its strategies, its parameters, and what it is given to begin with."""

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
    """What is tuned, by the same grid for all."""

    idle_timeout_s: float
    requests_per_instance: int

    def config(self) -> PolicyConfig:
        return PolicyConfig(idle_timeout_s=self.idle_timeout_s)


@dataclass(frozen=True)
class Setup:
    """``held``: packs that are in a host's RAM at the start, by its number."""

    config: PolicyConfig
    fleet: Fleet
    strategies: Strategies = field(default_factory=Strategies)
    held: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def plant(self, models: Sequence[ServedModel]) -> Plant:
        ids = count()
        policy = Policy(self.config, lambda: f"instance-{next(ids)}", START_S, self.strategies)
        return Plant(policy, self.fleet, models, held=self.held)


# From the cluster, the models, what is tuned, and the requests that it is tuned on.
System: TypeAlias = Callable[[Fleet, Sequence[ServedModel], Knobs, Sequence[Request]], Setup]


def ours(fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request]) -> Setup:
    """The scheduler as it runs: nothing is modelled, these are its own strategies."""
    return Setup(knobs.config(), fleet, held=one_copy_each(fleet, models))


def one_copy_each(fleet: Fleet, models: Sequence[ServedModel]) -> dict[int, list[str]]:
    """In the RAM of the cluster, as far as there is room: the largest first, each where most is left."""
    held: dict[int, list[str]] = {number: [] for number in range(fleet.num_hosts)}
    left = dict.fromkeys(held, fleet.arena_bytes)
    for model in sorted(models, key=lambda model: (-model.pack_bytes, model.name)):
        number = max(left, key=lambda number: (left[number], -number))
        if left[number] >= model.pack_bytes:
            left[number] -= model.pack_bytes
            held[number].append(model.name)
    return held


def all_everywhere(fleet: Fleet, models: Sequence[ServedModel]) -> dict[int, list[str]]:
    """In the RAM of every host, which must have room."""
    return {number: [model.name for model in models] for number in range(fleet.num_hosts)}

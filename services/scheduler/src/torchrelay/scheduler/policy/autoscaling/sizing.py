"""Number of instances per role: one more is wanted as long as it saves more late requests than it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling.demand import DecodeDemand, Demand
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlot
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import BOTH, ROLES, Role, Roles


class Sizing(NamedTuple):
    """Roles that are sized together, by the work that needs them; ``number``: instances that play all of them now."""

    roles: Roles
    work: Demand | DecodeDemand
    number: int

    @property
    def num_lost(self) -> float:
        """Requests that would be late with one instance fewer; only for two or more instances."""
        return self.work.fluid.num_saved(self.number - 1, 0.0)


@dataclass(frozen=True)
class Growth:
    """More instances for a model that serves. ``missing``: the part of ``wanted`` that it does not have."""

    wanted: Counter[Role]
    missing: Counter[Role]
    slots: Sequence[FreeSlot]
    load_s: float
    num_saved: float  # late requests that the first further instance saves
    held_s: float  # how long that is expected to be held

    @property
    def playing(self) -> Counter[Role]:
        """Instances per role that the model has."""
        return self.wanted - self.missing


def sizings_of(demand: Demand, playing: Counter[Role]) -> list[Sizing]:
    """The sizings of a model: prompts and answers both size instances that play both roles; otherwise prompts size
    prefill, and answers decode.
    """
    if demand.decode is None:
        number = min(playing[role] for role in ROLES)
        by_prompts = Sizing(BOTH, demand, number)
        return [by_prompts] if demand.answers is None else [by_prompts, Sizing(BOTH, demand.answers, number)]
    return [
        Sizing(frozenset((Role.PREFILL,)), demand, playing[Role.PREFILL]),
        Sizing(frozenset((Role.DECODE,)), demand.decode, playing[Role.DECODE]),
    ]


def wanted_instances(demand: Demand, playing: Counter[Role], load_s: float, config: PolicyConfig) -> Counter[Role]:
    """Wanted instances per role: those ``playing`` it, and more, up to the model's maximum, while each is predicted to
    save more late requests than it costs. One more also if enough requests were late recently; if roles are sized
    apart, these count for decode if it has more answers than its instances hold.
    """
    most = demand.model.max_instances or config.max_instances
    sizings = sizings_of(demand, playing)
    is_full = demand.decode is not None and demand.decode.backlog_s(playing[Role.DECODE]) > 0
    late_role = Role.DECODE if is_full else Role.PREFILL
    wanted: Counter[Role] = Counter()
    for sizing in sizings:
        work, number = sizing.work, sizing.number
        num_late = demand.num_late_before if late_role in sizing.roles and load_s < demand.late_s else 0
        is_short = number < most and num_late >= work.fluid.least_saved(number, load_s)
        number = max(number + is_short, work.fluid.wanted(number, load_s, most))
        wanted |= Counter(dict.fromkeys(sizing.roles, number))
    return wanted

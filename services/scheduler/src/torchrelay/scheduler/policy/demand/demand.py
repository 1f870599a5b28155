"""The demand for a model version, which the autoscaler decides on; and for decode instances, if each role is sized by
its own work, as different instances play the roles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.demand.lateness import Fluid
from torchrelay.scheduler.policy.demand.usage import WINDOW_S
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import BOTH, ROLES, Model, Role, Roles


@dataclass(frozen=True)
class DecodeDemand:
    """Answers as a fluid: an instance holds ``num_held`` answers at once and finishes each after ``answer_s``, so one
    second of its work is worth ``num_held / answer_s`` answers.
    """

    num_answers: int  # open answers and those of waiting requests
    num_held: int  # answers per instance whose tokens meet the target and whose KV fits the pool
    num_most: int  # answers per instance whose KV fits the pool; further answers wait
    answer_s: float  # from placement, before the prompt is computed, to the last token, in a batch of ``num_held``
    arrivals_per_s: float
    target_s: float  # for the first token; an answer that waits longer for a place is late
    late_s: float  # cost of a late request, in seconds of a slot
    last_full_at: float = 0.0  # when all decode instances were last needed

    @property
    def request_s(self) -> float:
        """Work of one answer, in seconds of an instance."""
        return self.answer_s / self.num_held

    @property
    def load(self) -> float:
        """Work that arrives per second, in instances."""
        return self.arrivals_per_s * self.request_s

    def backlog_s(self, num_instances: int) -> float:
        """Work beyond what the instances hold at once; negative if they can hold more."""
        return (self.num_answers - num_instances * self.num_held) * self.request_s

    @property
    def fluid(self) -> Fluid:
        work_s = self.num_answers * self.request_s
        return Fluid(work_s, self.load, self.request_s, self.target_s, self.late_s, self.answer_s, self.known_s)

    @property
    def known_s(self) -> float:
        """Answers go on for longer than the arrivals of a moment: a lack of places lasts as long as an instance."""
        return max(self.late_s, WINDOW_S)


def most_in_time(num_most: int, tbt_target_s: float, base_s: float, per_answer_s: float) -> int:
    """The largest batch whose tokens are at most ``tbt_target_s`` apart; ``num_most`` if a single answer misses the
    target, because more instances would not help then.
    """
    spare_s = tbt_target_s - base_s
    if spare_s < per_answer_s:
        return num_most
    return min(int(spare_s / per_answer_s), num_most) if per_answer_s > 0 else num_most


@dataclass(frozen=True)
class Demand:
    """Current demand for one model version."""

    model: Model
    num_waiting: int
    num_cold: int  # placed on instances that are still loading
    oldest_wait_s: float
    since_slot_lost_s: float = math.inf  # infinite: it never lost one while requests waited
    backlog_s: float = 0.0  # queued prompts, in seconds of one instance; 0 without a measured rate
    not_before: float = 0.0  # no load before this time, because a load failed
    avoid: frozenset[str] = frozenset()  # workers to use only if there is no other
    most_kv_bytes: int = 0  # largest KV of a waiting request; 0: all present pools hold all of them
    least_kv_bytes: int = 0
    by_tenant: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (num_waiting, num_cold), if several
    arrivals_per_s: float = 0.0  # recent rate
    num_late_before: int = 0  # recent late requests whose instances were loaded when they came
    load: float = 0.0  # seconds of prompts that arrive per second
    target_s: float = 2.0  # for the first token
    late_s: float = 60.0  # cost of a late request, in seconds of its slot
    spare_s: float = 60.0  # how long to keep an instance that the others could replace
    is_deleted: bool = False  # no longer callable
    forecast: tuple[float, float] = (math.inf, math.inf)  # begin and end of the next expected use; see ``usage``
    last_full_at: float = 0.0  # when it last needed all its instances
    load_s: Mapping[Tier, float] = field(default_factory=dict)
    decode: DecodeDemand | None = None  # if roles are sized apart; the other fields then describe prefill
    answers: DecodeDemand | None = None  # sizes instances that play both roles, beside prompts

    @property
    def request_s(self) -> float:
        """Mean work of a request, in seconds of an instance."""
        if self.arrivals_per_s and self.load:
            return self.load / self.arrivals_per_s
        return self.backlog_s / max(self.num_waiting, 1)

    @property
    def slack_s(self) -> float:
        """How long a request may wait: its target without its own prompt."""
        return max(self.target_s - self.request_s, self.target_s / 4)

    @property
    def fluid(self) -> Fluid:
        """If roles are sized apart, their savings are compared, so each is counted for as long as that of answers."""
        known_s = WINDOW_S if self.decode is None else self.decode.known_s
        return Fluid(self.backlog_s, self.load, self.request_s, self.slack_s, self.late_s, known_s=known_s)

    def is_expected(self, now: float) -> bool:
        """Whether the model should be loaded for the next expected request."""
        return self.forecast[0] <= now <= self.forecast[1]

    @property
    def slot_wait_s(self) -> float:
        """Time that the model has waited since it last had a slot, so that a model whose time slice has just ended is
        last, however old its queue.
        """
        return min(self.oldest_wait_s, self.since_slot_lost_s)

    @property
    def waiting_tenants(self) -> Sequence[str]:
        if not self.by_tenant:
            return [tenant_of(self.model.name)]
        return [tenant for tenant, (num_waiting, _) in self.by_tenant.items() if num_waiting]

    def slotless_tenant(self, num_slots_of: Counter[str]) -> str:
        """A tenant that waits for the model and has no slot; empty if each has a slot."""
        return next((tenant for tenant in self.waiting_tenants if not num_slots_of[tenant]), "")

    def load_reason(self, cause: str, why: str = "", figures: Mapping[str, int | float] | None = None) -> Reason:
        """The reason of a load. ``why`` may count the requests of all tenants; tenants that share the model see
        ``cause`` instead.
        """

        def text(why: str, num_waiting: int, num_cold: int) -> str:
            return f"{why}, {num_waiting} waiting" + (f", {num_cold} placed on loading instances" if num_cold else "")

        plain = cause.replace("_", " ")
        counts = {"num_waiting": self.num_waiting, "num_cold": self.num_cold, **(figures or {})}
        by_tenant = {tenant: text(plain, *numbers) for tenant, numbers in self.by_tenant.items()}
        return Reason(cause, text(why or plain, self.num_waiting, self.num_cold), counts, by_tenant)


class Sizing(NamedTuple):
    """Roles that are sized together, by the work that needs them; ``number``: instances that play all of them now."""

    roles: Roles
    work: Demand | DecodeDemand
    number: int

    @property
    def num_lost(self) -> float:
        """Requests that would be late with one instance fewer; only for two or more instances."""
        return self.work.fluid.num_saved(self.number - 1, 0.0)


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

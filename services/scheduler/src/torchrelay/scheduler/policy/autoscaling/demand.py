"""The demand for a model version, which the autoscaler decides on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.autoscaling.decode_demand import DecodeDemand
from torchrelay.scheduler.policy.autoscaling.lateness import Fluid
from torchrelay.scheduler.policy.autoscaling.usage import WINDOW_S
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import Model


@dataclass(frozen=True)
class Demand:
    """Current demand for one model version."""

    model: Model
    num_waiting: int
    num_cold: int  # placed on instances that are still loading
    oldest_wait_s: float
    since_slot_lost_s: float = math.inf  # infinite: it lost none since its oldest request came
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

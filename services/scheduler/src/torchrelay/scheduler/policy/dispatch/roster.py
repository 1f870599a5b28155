"""The instances of a version that take requests, with what changes only when a report or a command arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.core import InstancePhase, WorkerRef, WorkerStatus
from torchrelay.scheduler.policy.dispatch.prefill_lane import PrefillLane


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """An instance that takes requests."""

    worker_ref: WorkerRef
    host_id: str
    plays_prefill: bool
    plays_decode: bool
    phase: InstancePhase
    loaded_at: float  # predicted; of a loaded instance any past time
    latency: LatencyModel
    kv_pool_bytes: int
    full_step_s: float  # of a step full of prompts: more than that is not bound ahead
    excess_until: float = 0.0  # until then its worker computes prompts that an earlier scheduler bound

    @property
    def instance_id(self) -> str:
        return self.worker_ref.instance_id

    def load_left_s(self, now: float) -> float:
        return max(self.loaded_at - now, 0.0) if self.phase is InstancePhase.LOADING else 0.0

    def queued_s(self, lane: PrefillLane, now: float) -> float:
        """Prompts bound there and not computed, in seconds of work; an instance that loads has begun none."""
        bound_s = lane.work_s() if self.phase is InstancePhase.LOADING else lane.ahead_s(now)
        return bound_s + (self.excess_until - now) if self.excess_until > now else bound_s

    def overdue_s(self, lane: PrefillLane, now: float) -> float:
        """What these will take beyond that, as the first has: whatever an instance that computes nothing says of
        itself, it gets nothing more where there is a choice.
        """
        return 0.0 if self.phase is InstancePhase.LOADING else lane.overdue_s(now)

    def ahead_s(self, lane: PrefillLane, now: float) -> float:
        """The time that these will take."""
        return self.queued_s(lane, now) + self.overdue_s(lane, now)

    def bindable_at(self, lane: PrefillLane) -> float:
        """When less than a full step will be ahead, by the passing of time alone."""
        if self.phase is InstancePhase.LOADING:
            return math.inf
        return max(lane.less_ahead_at(self.full_step_s), self.excess_until - max(self.full_step_s - lane.work_s(), 0.0))


def computes_alike(before: WorkerStatus, after: WorkerStatus) -> bool:
    """Whether the entry of a worker's instance is as before its last report, unless it loads."""
    return (
        (before.incarnation, before.grpc_address, before.device)
        == (after.incarnation, after.grpc_address, after.device)
        and before.kv_pool_bytes == after.kv_pool_bytes
        and (before.step_s, before.prefill_tokens_per_s) == (after.step_s, after.prefill_tokens_per_s)
        and (before.latency is after.latency or before.latency == after.latency)
    )


class Rosters:
    """By version, built when they are asked for, and again after ``forget``; after ``forget_loads`` only those that load.
    A version is blocked while a full step of
    prompts is ahead on each of its instances: nothing is placed there.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[RosterEntry, ...]] = {}
        self._with_old_loads: set[str] = set()
        self._blocked_until: dict[str, float] = {}

    def of(
        self,
        version_id: str,
        build: Callable[[], Iterable[RosterEntry]],
        build_load: Callable[[RosterEntry], RosterEntry],
    ) -> tuple[RosterEntry, ...]:
        """``build_load``: an instance that loads, as it is now."""
        found = self._of.get(version_id)
        if found is None:
            found = self._of[version_id] = tuple(build())
        elif version_id in self._with_old_loads:
            is_loading = InstancePhase.LOADING
            found = tuple(build_load(entry) if entry.phase is is_loading else entry for entry in found)
            self._of[version_id] = found
        self._with_old_loads.discard(version_id)
        return found

    def forget(self, version_id: str) -> None:
        self._of.pop(version_id, None)
        self._blocked_until.pop(version_id, None)

    def forget_loads(self, version_id: str) -> None:
        """What is predicted of its loads has changed, and nothing else."""
        self._with_old_loads.add(version_id)

    def block(self, version_id: str, until: float) -> None:
        """Until then, unless its instances change or prompts leave them."""
        self._blocked_until[version_id] = until

    def unblock(self, version_id: str) -> None:
        self._blocked_until.pop(version_id, None)

    def is_blocked(self, version_id: str, now: float) -> bool:
        return version_id in self._blocked_until and now < self._blocked_until[version_id]

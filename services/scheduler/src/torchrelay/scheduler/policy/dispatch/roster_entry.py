"""The instances of a version that take requests, with what changes only when a report or a command arrives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.core import InstancePhase, WorkerRef, WorkerStatus
from torchrelay.scheduler.policy.dispatch.prefill_queue import PrefillQueue


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

    def queued_s(self, queue: PrefillQueue, now: float) -> float:
        """Prompts bound there and not computed, in seconds of work; an instance that loads has begun none."""
        bound_s = queue.work_s() if self.phase is InstancePhase.LOADING else queue.ahead_s(now)
        return bound_s + (self.excess_until - now) if self.excess_until > now else bound_s

    def queued_and_overdue_s(self, queue: PrefillQueue, now: float) -> tuple[float, float]:
        """``queued_s``, and what these will take beyond that, as the first has: whatever an instance that computes
        nothing says of itself, it gets nothing more where there is a choice.
        """
        if self.phase is InstancePhase.LOADING:
            return self.queued_s(queue, now), 0.0
        ahead_s, overdue_s = queue.ahead_and_overdue_s(now)
        return ahead_s + (self.excess_until - now) if self.excess_until > now else ahead_s, overdue_s

    def ahead_s(self, queue: PrefillQueue, now: float) -> float:
        """The time that these will take."""
        queued_s, overdue_s = self.queued_and_overdue_s(queue, now)
        return queued_s + overdue_s

    def bindable_at(self, queue: PrefillQueue) -> float:
        """When less than a full step will be ahead, by the passing of time alone."""
        spare_s = self.full_step_s - queue.work_s()
        if self.phase is InstancePhase.LOADING and spare_s <= 0:
            return math.inf
        spare_at = 0.0 if self.phase is InstancePhase.LOADING else queue.less_ahead_at(self.full_step_s)
        return max(spare_at, self.excess_until - max(spare_s, 0.0))


def computes_alike(before: WorkerStatus, after: WorkerStatus) -> bool:
    """Whether the entry of a worker's instance is as before its last report, unless it loads."""
    return (
        (before.incarnation, before.grpc_address, before.device)
        == (after.incarnation, after.grpc_address, after.device)
        and before.kv_pool_bytes == after.kv_pool_bytes
        and (before.step_s, before.prefill_tokens_per_s) == (after.step_s, after.prefill_tokens_per_s)
        and (before.latency is after.latency or before.latency == after.latency)
    )

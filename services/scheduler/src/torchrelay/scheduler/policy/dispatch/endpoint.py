"""An instance that takes requests, with the properties that change only when a report or a command arrives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.dispatch.prefill_queue import PrefillQueue
from torchrelay.scheduler.policy.types import InstancePhase, WorkerRef, WorkerStatus


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An instance that takes requests, with its properties for dispatch."""

    worker_ref: WorkerRef
    host_id: str
    plays_prefill: bool
    plays_decode: bool
    phase: InstancePhase
    loaded_at: float  # predicted; any past time if it is loaded
    latency: LatencyModel
    kv_pool_bytes: int
    full_step_s: float  # time of a step full of prompts; no more than that is dispatched ahead
    returning_s: float = 0.0  # work of the recalled prompts that are on their way to it
    load_s: float = 0.0  # predicted duration of its load, from begin to end; 0 before its first layer has arrived
    num_layers: int = 1
    hands_over: bool = True  # KV to other instances, and takes theirs

    @property
    def instance_id(self) -> str:
        return self.worker_ref.instance_id

    def load_left_s(self, now: float) -> float:
        return max(self.loaded_at - now, 0.0) if self.phase is InstancePhase.LOADING else 0.0

    def loaded_share(self, at: float) -> float:
        """Predicted share of the layers that are loaded at a time."""
        if self.phase is not InstancePhase.LOADING or self.loaded_at <= at:
            return 1.0
        return max(1.0 - (self.loaded_at - at) / self.load_s, 0.0) if self.load_s else 0.0

    def can_take(self, queued_s: float, prompt_s: float, now: float) -> bool:
        """Whether a prompt may be dispatched behind others: less than a full step is queued, or the instance will have
        computed all of them layer by layer when it is loaded.
        """
        if queued_s < self.full_step_s:
            return True
        left_s = self.load_left_s(now)
        return left_s > 0.0 and queued_s + prompt_s * self.load_s / left_s <= self.load_s

    def computed_s(self, prompts_s: float, now: float) -> float:
        """Time until prompts are computed that take ``prompts_s`` on a loaded instance: while it loads, an instance
        computes all layers but the last.
        """
        return max(self.load_left_s(now) + prompts_s / self.num_layers, prompts_s)

    def free_s(self, queue: PrefillQueue, now: float) -> float:
        """Expected time until the dispatched prompts are computed; a loading instance is then loaded, too."""
        if self.phase is InstancePhase.LOADING:
            return self.computed_s(queue.left_by_layer_s(self.loaded_share(now), now), now)
        return self.ahead_s(queue, now)

    def queued_s(self, queue: PrefillQueue, now: float) -> float:
        """Work of the dispatched prompts that are not computed, as if a loading instance had begun none."""
        bound_s = queue.work_s() if self.phase is InstancePhase.LOADING else queue.ahead_s(now)
        return bound_s + self.returning_s

    def queued_and_overdue_s(self, queue: PrefillQueue, now: float) -> tuple[float, float]:
        """``queued_s``, and how long the first prompt is overdue, which is expected again of the rest: an instance that
        computes nothing, whatever it reports, gets no more prompts if there is a choice.
        """
        if self.phase is InstancePhase.LOADING:
            return self.queued_s(queue, now), 0.0
        ahead_s, overdue_s = queue.ahead_and_overdue_s(now)
        return ahead_s + self.returning_s, overdue_s

    def ahead_s(self, queue: PrefillQueue, now: float) -> float:
        """Expected time until the dispatched prompts are computed."""
        queued_s, overdue_s = self.queued_and_overdue_s(queue, now)
        return queued_s + overdue_s

    def bindable_at(self, queue: PrefillQueue, now: float) -> float:
        """When less than a full step will be ahead, without another report."""
        spare_s = self.full_step_s - queue.work_s()
        if self.phase is InstancePhase.LOADING and spare_s <= 0:
            return math.inf
        spare_at = 0.0 if self.phase is InstancePhase.LOADING else queue.less_ahead_at(self.full_step_s)
        return max(spare_at, now + self.returning_s - max(spare_s, 0.0)) if self.returning_s else spare_at


def computes_alike(before: WorkerStatus, after: WorkerStatus) -> bool:
    """Whether both reports give the same endpoint, apart from the progress of a load."""
    return (
        (before.incarnation, before.grpc_address, before.device)
        == (after.incarnation, after.grpc_address, after.device)
        and (before.kv_pool_bytes, before.hands_over) == (after.kv_pool_bytes, after.hands_over)
        and (before.step_s, before.prefill_tokens_per_s) == (after.step_s, after.prefill_tokens_per_s)
        and (before.latency is after.latency or before.latency == after.latency)
    )

"""An instance: what was ordered, what its worker reported of it, and the work that is dispatched to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.cluster.open_attempts import DispatchedWork
from torchrelay.scheduler.policy.estimates.correction import TTFT_WEIGHT, Correction
from torchrelay.scheduler.policy.estimates.token_time import TokenTime
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import Admission, InstancePhase, Role, Roles, WorkerRef

# A worker's fixed time to begin and hand over a prompt, however short. If a full step's worth of short prompts were
# dispatched at once, a tenant's burst would put dozens of them ahead of another tenant's next request.
_BEGIN_S = 0.003
_UNKNOWN_LATENCY = LatencyModel()
_NO_WORKER = WorkerRef("", "", "")


@dataclass(slots=True)
class ReturningPrompt:
    """A prompt that was recalled from a loading instance, expected until ``until`` at a loaded one, which will compute
    on for ``left_s``.
    """

    model: str  # that the request names
    left_s: float
    until: float
    admission: Admission | None = None  # once its gateway has asked again


@dataclass(eq=False, slots=True)
class Instance:
    """A model in a worker's slot, from the decision to load it until the slot is free again. ``Instances.put`` must
    follow each change of the fields before ``unload_retry_at``.
    """

    instance_id: str
    model: str
    version_id: str
    pack_id: str
    worker_id: str
    incarnation: str  # of the worker
    host_id: str
    roles: Roles
    phase: InstancePhase
    since: float  # when it entered this phase
    created_at: float
    accepted_at: float = 0.0  # when the worker accepted the Load; 0: not yet
    confirmed: bool = False  # a report has shown it
    unanswered_at: float = 0.0  # when the deadline of its Load passed; 0: it did not
    error_before: str = ""  # the slot's error from an earlier load
    pending_roles: Roles | None = None  # ordered, not yet set
    roles_since: float = 0.0  # when it was last ordered to play other roles; 0: never
    roles_reason: str = ""  # why
    roles_retry_at: float = 0.0  # no new order before this time, as the last one failed
    num_layers_ready: int = 0
    num_layers: int = 0
    loaded_share: float = 0.0  # of the pack's bytes
    progressed_at: float = 0.0  # when the last layer was loaded
    reason: Reason = field(default_factory=Reason)  # why it was loaded, or why it is being drained
    unload_retry_at: float | None = None  # when to tell its worker again to end the drain
    names_at_drain: tuple[str, ...] = ()  # models of its version then: ``reason`` may name one to these alone

    work: DispatchedWork = field(default_factory=DispatchedWork)
    returning: dict[str, ReturningPrompt] = field(default_factory=dict)  # by request, in the order of their recalls
    # By worker that took prompts over while it loaded: their number, and the computation that it need not do.
    prompt_moves: dict[str, tuple[int, float]] = field(default_factory=dict)
    last_active: float = 0.0  # when an attempt was last placed or released
    ttft_correction: Correction = field(default_factory=lambda: Correction(TTFT_WEIGHT))
    token_time: TokenTime = field(default_factory=TokenTime)

    # What dispatch knows of it while it takes requests; see ``dispatch/endpoints.py``.
    worker_ref: WorkerRef = _NO_WORKER
    plays_prefill: bool = False
    plays_decode: bool = False
    latency: LatencyModel = _UNKNOWN_LATENCY
    full_step_s: float = 0.0  # time of a step full of prompts; no more than that is dispatched ahead
    kv_pool_bytes: int = 0
    hands_over: bool = True  # KV to other instances, and takes theirs
    loaded_at: float = 0.0  # predicted; any past time if it is loaded
    load_s: float = 0.0  # predicted duration of its load, from begin to end; 0 before its first layer has arrived
    num_layer_steps: int = 1  # layers that it computes one after the other while it loads

    @property
    def changed_at(self) -> float:
        """When the instance last entered a phase or was ordered to play other roles."""
        return max(self.since, self.roles_since)

    @property
    def accepted(self) -> bool:
        return self.accepted_at > 0

    @property
    def is_loading(self) -> bool:
        return self.phase is InstancePhase.LOADING

    @property
    def placeable(self) -> bool:
        """Whether requests may be placed there: accepted by its worker, and not draining."""
        return self.accepted and self.staying

    @property
    def staying(self) -> bool:
        return self.phase in (InstancePhase.LOADING, InstancePhase.READY)

    @property
    def unused_since(self) -> float:
        """The later of the last use and the end of the load, so that a long load does not count as idle time."""
        return max(self.last_active, self.since) if self.phase is InstancePhase.READY else self.last_active

    @property
    def is_settled(self) -> bool:
        """Whether the instance serves and no command to its worker is under way."""
        return self.phase is InstancePhase.READY and self.accepted and self.pending_roles is None

    def takes_roles(self, now: float) -> bool:
        """Whether the instance may be ordered to play other roles."""
        return self.placeable and self.pending_roles is None and now >= self.roles_retry_at

    @property
    def target_roles(self) -> Roles:
        return self.roles if self.pending_roles is None else self.pending_roles

    def plays(self, role: Role) -> bool:
        """Whether the instance plays the role now, and is not ordered to give it up."""
        return role in self.roles and role in self.target_roles

    @property
    def max_prompts_ahead(self) -> int:
        """Maximum number of prompts if several tenants use the instance: as many as begin within a step's fixed time,
        for this step and the next.
        """
        return 2 * max(1, round(self.latency.prefill.base_s / _BEGIN_S))

    @property
    def takes_beside_others(self) -> bool:
        """Whether the instance may take another prompt if several tenants use it."""
        return not self.plays_prefill or len(self.work.queue) < self.max_prompts_ahead

    @property
    def kv_unreserved_bytes(self) -> int:
        return self.kv_pool_bytes - self.work.kv_bytes

    # Times of its load and of the prompts that are dispatched to it

    def load_left_s(self, now: float) -> float:
        return max(self.loaded_at - now, 0.0) if self.phase is InstancePhase.LOADING else 0.0

    def predict_load_s(self, whole_load_s: float, now: float, *, by_layer: bool = True) -> float:
        """Predicts the time until all layers are loaded, with ``by_layer`` from the time and the bytes up to the last
        layer that was loaded, if there is one. An overdue load is expected to take as long again as it is overdue.
        """
        if not self.is_loading:
            return 0.0
        since, left_s = self.created_at, whole_load_s
        if by_layer and self.num_layers_ready:
            since = self.progressed_at
            left_s = (since - self.created_at) * (1 / self.loaded_share - 1)
        return max(abs(left_s - max(now - since, 0.0)), left_s / 10)

    def share_loaded_at(self, at: float) -> float:
        """Predicted share of the layers that are loaded at a time."""
        if not self.is_loading or self.loaded_at <= at:
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
        return max(self.load_left_s(now) + prompts_s / self.num_layer_steps, prompts_s)

    def free_s(self, now: float) -> float:
        """Expected time until the dispatched prompts are computed; a loading instance is then loaded, too."""
        if self.is_loading:
            return self.computed_s(self.work.queue.left_by_layer_s(self.share_loaded_at(now), now), now)
        return self.ahead_s(now)

    def queued_and_overdue_s(self, now: float) -> tuple[float, float]:
        """Work of the dispatched prompts that are not computed, as if a loading instance had begun none; and how long
        the first prompt is overdue, which is expected again of the rest: an instance that computes nothing, whatever it
        reports, gets no more prompts if there is a choice.
        """
        queue = self.work.queue  # no property tells the phase, as this runs for each instance of a placement
        return (queue.work_s(), 0.0) if self.phase is InstancePhase.LOADING else queue.ahead_and_overdue_s(now)

    def ahead_s(self, now: float) -> float:
        """Expected time until the dispatched prompts are computed."""
        queued_s, overdue_s = self.queued_and_overdue_s(now)
        return queued_s + overdue_s

    def returning_s(self, now: float, before: str = "") -> float:
        """Work of the recalled prompts that are on their way to it; of those before a request, if it is one of them."""
        total_s = 0.0
        for request_id, prompt in list(self.returning.items()):
            if request_id == before:
                break
            if prompt.until <= now:
                del self.returning[request_id]
            else:
                total_s += prompt.left_s
        return total_s

    def bindable_at(self, now: float, returning_s: float = 0.0) -> float:
        """When less than a full step will be ahead, without another report. ``returning_s``: work of the recalled
        prompts that come first.
        """
        queue = self.work.queue
        spare_s = self.full_step_s - queue.work_s()
        if self.is_loading and spare_s <= 0:
            return math.inf
        spare_at = 0.0 if self.is_loading else queue.less_ahead_at(self.full_step_s)
        return max(spare_at, now + returning_s - max(spare_s, 0.0)) if returning_s else spare_at

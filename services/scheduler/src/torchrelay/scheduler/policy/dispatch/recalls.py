"""Recalls prompts that have not begun from an instance that gives up the role, or whose worker leaves. Their gateways
end these attempts and ask again, once per request.
"""

from __future__ import annotations

from msgspec import structs

from torchrelay.common.liveness import SILENT_S
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch import endpoints
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import BOTH, PromptSource, Role, Roles


def recall_from_roles(state: State, instance: Instance, lost: Roles, now: float) -> None:
    """Recalls the prompts that have not begun and are dispatched to the instance for a role that it gives up."""
    names = " and ".join(role.name.lower() for role in sorted(lost))
    _recall_dispatched(state, instance, lost, f"{instance.worker_id} gives up {names}", now)


def recall_from_leaving(state: State, instance: Instance, now: float) -> None:
    """Recalls the prompts that have not begun at the instance of a worker that leaves, if another worker stays: the
    last one computes them itself, as far as its grace allows.
    """
    if not all(worker.is_leaving for worker in state.membership.workers.values()):
        _recall_dispatched(state, instance, BOTH, f"{instance.worker_id} leaves", now)


def _recall_dispatched(state: State, instance: Instance, lost: Roles, why: str, now: float) -> None:
    """Recalls the prompts that have not begun and are dispatched to the instance for one of these roles."""
    for source in state.instances.of_version(instance.version_id):
        work, is_loading = source.work, source.is_loading
        for key, _ in work.queue.not_begun(now, is_loading=is_loading):
            placement = work.prefills[key].placement
            refs = {Role.PREFILL: placement.prefill, Role.DECODE: placement.decode}
            is_dispatched = any(refs[role].instance_id == instance.instance_id for role in lost)
            if is_dispatched and work.prefills[key].may_be_recalled:
                reason = f"attempt {key.attempt} has not begun, and {why}"
                order(state, work.prefills[key], is_loading=is_loading, reason=reason, now=now)


def order(state: State, attempt: OpenAttempt, *, is_loading: bool, reason: str, now: float) -> None:
    """Recalls the attempt. ``is_loading``: its prefill worker, which keeps what it has computed of the prompt."""
    admission = attempt.admission
    attempt.is_recalled, attempt.is_partly_computed = True, is_loading
    state.effects.answers.append(effects.Recall(admission.gateway_id, admission.key, is_loading))
    event = effects.SchedulerEvent(now, "recall", admission.model, admission.key.request_id, reason)
    state.effects.events.append(event)


def recalled(state: State, attempt: OpenAttempt, now: float) -> None:
    """Records that a recalled attempt has left its instances. Its request will be admitted again with its first arrival
    time, and its tenant is refunded, as the attempt was not served.
    """
    admission = attempt.admission
    state.queues.refund(admission)
    source = _source(state, attempt, now) if attempt.is_partly_computed else None
    state.recalled[admission.key.request_id] = structs.replace(
        admission, prompt_source=source, returns_to=attempt.returns_to
    )


def _source(state: State, attempt: OpenAttempt, now: float) -> PromptSource | None:
    admission, worker = attempt.admission, attempt.placement.prefill
    model = state.known_model(admission.version_id)
    status = state.membership.workers.get(worker.worker_id)
    if status is None or not status.computes_by_layer:
        return None
    source = state.instances.get(worker.instance_id)
    if source is None or source not in endpoints.of_version(state, model, now).prefills:
        return None  # its worker is lost or suspect
    prompt_s, kept_until = attempt.placement.predicted.prefill_s, now + SILENT_S
    return PromptSource(
        admission.key, worker, source.host_id, source.loaded_at, source.load_s, kept_until, attempt.placed_at, prompt_s
    )

"""Recalls prompts that are bound to an instance, have not begun, and would begin much sooner at another: because that
is new, or because their worker has become slow; or that are bound to an instance for a role that it gives up. Their
gateways end these attempts and ask again, once per request.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.common.liveness import SILENT_S
from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.core import BOTH, Instance, InstancePhase, PromptSource, Role, Roles
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch.roster_entry import RosterEntry
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import rosters


def recall(state: State, now: float, version_ids: Iterable[str]) -> None:
    """Recalls the prompts of each version that gain more than ``recall_gain_s`` and more than their own prefill time,
    which a prompt would lose if it has begun after all.

    gain = (load left + ahead) here - (load left + ahead + waiting / instances + difference in prefill time) there
    """
    for version_id in sorted(version_ids):
        if (model := state.models.get(version_id)) is None:
            continue
        prefills = rosters.prefills(state, model, now)
        if len(prefills) < 2 or not any(state.attempts.at(entry.instance_id).prefills for entry in prefills):
            continue
        waiting_s = prefills[0].latency.queued_s(state.queues.num_prefill_tokens(version_id)) / len(prefills)
        begin_s = {
            entry.instance_id: entry.load_left_s(now) + _ahead_s(state, entry, now) + waiting_s for entry in prefills
        }
        is_taken_over = any(entry.phase is not InstancePhase.LOADING for entry in prefills)
        for source in prefills:
            if is_taken_over and source.phase is InstancePhase.LOADING:
                continue  # see live_scaling
            others = [entry for entry in prefills if entry is not source]
            for attempt, here_s in _not_begun(state, source, now):
                own_s = attempt.placement.predicted.prefill_s
                target = min(others, key=lambda entry: (begin_s[entry.instance_id], entry.instance_id))
                there_s, takes_s = begin_s[target.instance_id], _prefill_s(state, target, attempt, now)
                gain_s = here_s - there_s - max(takes_s - own_s, 0.0)
                if gain_s > max(state.config.recall_gain_s, own_s):
                    begin_s[target.instance_id] += takes_s
                    _recall(state, attempt, source, here_s, target, there_s, now)


def recall_from_roles(state: State, instance: Instance, lost: Roles, now: float) -> None:
    """Recalls the prompts that have not begun and are bound to the instance for a role that it gives up."""
    names = " and ".join(role.name.lower() for role in sorted(lost))
    _recall_bound(state, instance, lost, f"{instance.worker_id} gives up {names}", now)


def recall_from_leaving(state: State, instance: Instance, now: float) -> None:
    """Recalls the prompts that have not begun and are bound to the instance of a worker that leaves, if another worker
    stays: the last one computes them itself, as far as its grace allows.
    """
    if not all(worker.is_leaving for worker in state.membership.workers.values()):
        _recall_bound(state, instance, BOTH, f"{instance.worker_id} leaves", now)


def _recall_bound(state: State, instance: Instance, lost: Roles, why: str, now: float) -> None:
    """Recalls the prompts that have not begun and are bound to the instance for one of these roles."""
    for source in state.instances.of_version(instance.version_id):
        work, is_loading = state.attempts.at(source.instance_id), source.phase is InstancePhase.LOADING
        for key, _ in work.queue.not_begun(now, is_loading=is_loading):
            placement = work.prefills[key].placement
            refs = {Role.PREFILL: placement.prefill, Role.DECODE: placement.decode}
            is_bound = any(refs[role].instance_id == instance.instance_id for role in lost)
            if is_bound and work.prefills[key].may_be_recalled:
                reason = f"attempt {key.attempt} has not begun, and {why}"
                order(state, work.prefills[key], is_loading=is_loading, reason=reason, now=now)


def _ahead_s(state: State, entry: RosterEntry, now: float) -> float:
    return entry.ahead_s(state.attempts.at(entry.instance_id).queue, now)


def _prefill_s(state: State, entry: RosterEntry, attempt: OpenAttempt, now: float) -> float:
    admission = attempt.admission
    prefill_s = admission.num_contexts * entry.latency.prefill_s(admission.num_context_tokens)
    return prefill_s * state.corrections.of(entry.instance_id, now)


def _not_begun(state: State, source: RosterEntry, now: float) -> list[tuple[OpenAttempt, float]]:
    """Attempts that may be recalled, with the time until each begins if none ahead of it is recalled; last first."""
    work, is_loading = state.attempts.at(source.instance_id), source.phase is InstancePhase.LOADING
    load_left_s = source.load_left_s(now)
    unbegun = [
        (work.prefills[key], load_left_s + ahead_s) for key, ahead_s in work.queue.not_begun(now, is_loading=is_loading)
    ]
    return [item for item in reversed(unbegun) if item[0].may_be_recalled]


def _recall(
    state: State,
    attempt: OpenAttempt,
    source: RosterEntry,
    here_s: float,
    target: RosterEntry,
    there_s: float,
    now: float,
) -> None:
    here, there = f"in {format_duration(here_s)} on {source.worker_ref.worker_id}", format_duration(there_s)
    number = attempt.admission.key.attempt
    reason = f"attempt {number} would begin {here}, in {there} on {target.worker_ref.worker_id}"
    order(state, attempt, is_loading=source.phase is InstancePhase.LOADING, reason=reason, now=now)


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
    state.recalled[admission.key.request_id] = admission.admitted_at, source


def _source(state: State, attempt: OpenAttempt, now: float) -> PromptSource | None:
    key, worker, model = attempt.admission.key, attempt.placement.prefill, state.models[attempt.admission.version_id]
    for entry in rosters.prefills(state, model, now):
        if entry.instance_id == worker.instance_id:
            prompt_s = attempt.placement.predicted.prefill_s
            kept_until = now + SILENT_S
            return PromptSource(
                key, worker, entry.host_id, entry.loaded_at, entry.load_s, kept_until, attempt.placed_at, prompt_s
            )
    return None  # its worker is lost or suspect

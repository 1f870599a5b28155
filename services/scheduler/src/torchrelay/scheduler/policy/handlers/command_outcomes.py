"""Consequences of the outcomes of commands."""

from __future__ import annotations

from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.dispatch import dispatch
from torchrelay.scheduler.policy.handlers import instance_changes, relay_plans, scaling
from torchrelay.scheduler.policy.inputs import (
    CommandEnded,
    CommandOutcome,
    Copy,
    Load,
    Retention,
    RoleChange,
    Unload,
)
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import InstancePhase, Roles


def apply(state: State, ended: CommandEnded, now: float) -> str:
    """Applies an outcome. Returns the version to decide on anew; empty: none."""
    command, cause, is_accepted = ended.command, ended.cause, ended.outcome is CommandOutcome.ACCEPTED
    match command:
        case Load(instance_id):
            if instance := state.instances.get(instance_id):
                is_over = _load_ended(state, instance, ended, command.failed_store, now)
                return instance.version_id if is_over else ""
        case RoleChange(instance_id):
            if instance := state.instances.get(instance_id):
                if not is_accepted:
                    _keep_roles(state, instance, cause, now)
                elif instance.pending_roles is not None:
                    _set_roles(state, instance, instance.pending_roles)
                    return instance.version_id
        case Unload(instance_id):
            if not is_accepted and (instance := state.instances.get(instance_id)):
                scaling.unload_failed(state, instance_id, now)
                state.record_event(now, "drain_failed", instance, cause)
        case Copy(pack_id, store_id):
            if is_accepted:
                state.transfers.accepted((pack_id, store_id), now)
            else:
                relay_plans.relay_refused(state, pack_id, store_id, cause, now)
            if ended.outcome is CommandOutcome.NOT_FOUND:
                state.copies.forget(pack_id)
        case Retention(store_id):
            if not is_accepted:
                state.retention.refused(store_id, now)
    return ""


def _load_ended(state: State, instance: Instance, ended: CommandEnded, failed_store: str, now: float) -> bool:
    """Returns whether the load is given up."""
    waits_for_store = failed_store and instance.phase is InstancePhase.LOADING and not instance.num_layers_ready
    if instance.accepted and not waits_for_store:
        return False
    if ended.outcome is CommandOutcome.ACCEPTED:  # the worker computes with the layers that it has
        instance.accepted_at = now
        state.instances.put(instance)
        dispatch.place_waiting(state, now, (instance.version_id,))
        return False
    if ended.outcome is CommandOutcome.UNANSWERED:
        instance.unanswered_at = now
        state.instances.put(instance)
        return False
    if failed_store:
        relay_plans.relay_refused(state, instance.pack_id, failed_store, ended.cause, now)
    figures = {"error": ended.cause} | ({"store": failed_store} if failed_store else {})
    instance_changes.give_up_load(state, instance, Reason(scaling.LOAD_REFUSED, ended.cause, figures), now)
    return True


def _set_roles(state: State, instance: Instance, roles: Roles) -> None:
    state.membership.set_roles(instance.worker_id, roles)
    instance.roles, instance.pending_roles = roles, None
    state.instances.put(instance)


def _keep_roles(state: State, instance: Instance, cause: str, now: float) -> None:
    instance.pending_roles, instance.roles_retry_at = None, now + state.config.roles_retry_s
    state.instances.put(instance)
    state.record_event(now, "set_roles_failed", instance, cause)

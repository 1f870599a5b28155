"""Tells gateways how long their requests wait for a model that no instance serves yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torchrelay.scheduler.policy.dispatch import backlogs, endpoints
from torchrelay.scheduler.policy.effects import LoadNotice
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import InstancePhase

_EVERY_S: Final = 1.0  # between notices about a version


def waits_for_load(state: State, version_id: str) -> bool:
    """Whether requests of the version wait for their first token while none of its instances is loaded."""
    instances = state.instances.of_version(version_id)
    if any(instance.phase is InstancePhase.READY for instance in instances):
        return False
    placed = state.attempts.attempts_at([instance.instance_id for instance in instances])
    return state.queues.num_waiting(version_id) > 0 or any(not attempt.is_computed for attempt in placed)


def tell(state: State, version_ids: Iterable[str], now: float) -> None:
    """Tells the gateways whose requests wait for these versions; about each version once a second, and when it
    gets a slot.
    """
    for version_id in version_ids:
        version = state.versions.get(version_id)
        has_slot = any(instance.staying for instance in state.instances.of_version(version_id))
        if version is None or (model := version.model) is None:
            continue
        if now < version.told_at + _EVERY_S and (version.had_slot_when_told or not has_slot):
            continue
        loading = endpoints.loading_prefills(state, model, now)
        if loading is None:
            continue
        placed = state.attempts.attempts_at([instance.instance_id for instance in loading])
        waiting = (*state.queues.waiting(version_id), *(attempt.admission for attempt in placed))
        if gateway_ids := sorted({admission.gateway_id for admission in waiting}):
            version.told_at, version.had_slot_when_told = now, has_slot
            first = min(loading, key=lambda instance: instance.load_left_s(now), default=None)  # expected to end first
            ready, number = (first.num_layers_ready, first.num_layers) if first is not None else (0, 0)
            left_s = backlogs.cold_wait_s(state, model, now) or 0.0
            state.effects.notices += [
                LoadNotice(gateway_id, version_id, has_slot, ready, number, left_s) for gateway_id in gateway_ids
            ]

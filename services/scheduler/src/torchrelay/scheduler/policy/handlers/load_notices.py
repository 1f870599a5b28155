"""Tells gateways how long their requests wait for a model that no instance serves yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torchrelay.scheduler.policy.dispatch.endpoint import Endpoint
from torchrelay.scheduler.policy.effects import LoadNotice
from torchrelay.scheduler.policy.handlers import backlogs, endpoints
from torchrelay.scheduler.policy.state import State

EVERY_S: Final = 1.0  # between notices about a version


def tell(state: State, version_ids: Iterable[str], now: float) -> None:
    """Tells the gateways whose requests wait for these versions; about each version once a second, and when it
    gets a slot.
    """
    for version_id in version_ids:
        model, told = state.models.get(version_id), state.loads_told.get(version_id)
        if model is None:
            continue
        if told is not None and now < told[0] + EVERY_S and (told[1] or not _has_slot(state, version_id)):
            continue
        entries = endpoints.loading_prefills(state, model, now)
        if entries is None:
            continue
        if gateway_ids := _waiting_gateways(state, version_id, entries):
            has_slot = _has_slot(state, version_id)
            state.loads_told[version_id] = now, has_slot
            ready, number = _layers(state, entries, now)
            left_s = backlogs.cold_wait_s(state, model, now) or 0.0
            state.effects.notices += [
                LoadNotice(gateway_id, version_id, has_slot, ready, number, left_s) for gateway_id in gateway_ids
            ]


def _waiting_gateways(state: State, version_id: str, entries: Iterable[Endpoint]) -> list[str]:
    """Gateways with requests that wait in the queue or at loading instances."""
    queued = (admission.gateway_id for admission in state.queues.waiting(version_id))
    placed = state.attempts.attempts_at([entry.instance_id for entry in entries])
    return sorted({*queued, *(attempt.admission.gateway_id for attempt in placed)})


def _layers(state: State, entries: Iterable[Endpoint], now: float) -> tuple[int, int]:
    """The layers that have arrived of the load that is expected to end first, and all its layers."""
    first = min(entries, key=lambda entry: entry.load_left_s(now), default=None)
    instance = state.instances.get(first.instance_id) if first is not None else None
    return (instance.num_layers_ready, instance.num_layers) if instance is not None else (0, 0)


def _has_slot(state: State, version_id: str) -> bool:
    return any(instance.staying for instance in state.instances.of_version(version_id))

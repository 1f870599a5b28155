"""What becomes of a transfer's events: entries of the history, and for the replicator's copies their outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrelay.scheduler.policy.core import Model
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.relay.transfer_events import transfer_event
from torchrelay.scheduler.policy.relay.transfers import Transfer, TransferEvent, TransferEventKind
from torchrelay.scheduler.policy.state import State


def record(state: State, events: Iterable[TransferEvent], now: float) -> None:
    for event in events:
        _record_history(state, event, now)
        if event.kind in (TransferEventKind.FINISHED, TransferEventKind.FAILED):
            _record_copy(state, event.transfer, now)


def record_lost(state: State, events: Iterable[TransferEvent], now: float) -> None:
    """The target is gone: no fault of its copies, so where they may go next is not held against it."""
    for event in events:
        _record_history(state, event, now)
        if event.transfer.cause is not None:
            state.replication_state.clear_failures(event.transfer.key)


def _record_history(state: State, event: TransferEvent, now: float) -> None:
    if event.in_history:
        model = state.model_of_pack(event.transfer.pack_id)
        state.effects.events.append(transfer_event(event, model, now))


def _record_copy(state: State, transfer: Transfer, now: float) -> None:
    """A copy that the replicator ordered is there, or has failed."""
    cause, error, replication_state = transfer.cause, transfer.error, state.replication_state
    if cause is None:
        return
    if error:
        replication_state.fail(transfer.key, cause, now, state.config)
    else:
        replication_state.clear_failures(transfer.key)
    if transfer.pack_id not in replication_state.recent_packs:
        return
    model, took_s = replication_state.recent_packs.use(transfer.pack_id).model, now - transfer.planned_at
    fields: dict[str, str | float] = {"pack_id": transfer.pack_id, "store_id": transfer.target, "took_s": took_s}
    fields |= {"cause": cause.value} | ({"error": error} if error else {})
    kind, reason = ("copy_failed", error) if error else ("copied", f"{cause.value} is done")
    record_copy_event(state, now, kind, model, f"{transfer.target}: {reason}", fields)


def record_copy_event(
    state: State, now: float, kind: str, model: Model, reason: str, fields: Mapping[str, str | float]
) -> None:
    topic = {"copied": "finished", "copy_failed": "failed"}.get(kind, kind)
    event = SchedulerEvent(now, kind, model.name, model.name, reason, f"copy.{topic}", fields)
    state.effects.events.append(event)

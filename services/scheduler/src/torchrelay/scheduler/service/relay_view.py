"""Relays as people see them: a plan, what the reports tell of it, and how long it will yet take."""

from __future__ import annotations

from torchrelay.control.v1.scheduler_pb2 import RelaySource, RelayView
from torchrelay.scheduler.policy.core import PackCopy
from torchrelay.scheduler.policy.relay.replan import SLOW_AFTER_S
from torchrelay.scheduler.policy.relay.running_relays import RunningRelay, measured_bytes_per_s
from torchrelay.scheduler.policy.relay.transfer_events import mean_bytes_per_s
from torchrelay.scheduler.policy.relay.transfers import TransferStatus
from torchrelay.scheduler.policy.state import State


def relay_views(state: State, now: float) -> list[RelayView]:
    """Those under way, and for some seconds those that have ended."""
    slow = {(relay.pack_id, relay.target) for relay in state.relays.running() if _is_slow(relay, now)}
    shown = state.transfers.shown(now)
    names = {pack_id: state.model_of_pack(pack_id).name for pack_id in {transfer.pack_id for transfer in shown}}
    return [_view(transfer, names[transfer.pack_id], transfer.key in slow, now) for transfer in shown]


def _is_slow(relay: RunningRelay, now: float) -> bool:
    """For a while now; one that was looked into and is still slow has been for longer."""
    return relay.slow_since > 0 and (relay.replanned_at > 0 or now - relay.slow_since >= SLOW_AFTER_S)


def _view(transfer: TransferStatus, model: str, is_slow: bool, now: float) -> RelayView:
    copy = transfer.copy
    view = RelayView(
        pack_id=transfer.pack_id,
        model=model,
        target=transfer.target,
        state=_state(transfer, is_slow),
        urgent=transfer.urgent,
        sources=_sources(transfer),
        pack_bytes=transfer.pack_bytes,
        planned_bytes_per_s=transfer.planned_bytes_per_s,
        running_s=transfer.running_s(now),
        num_replans=transfer.num_replans,
        reason=transfer.reason.text,
        error=transfer.error,
    )
    if copy is not None:
        view.num_chunks, view.num_chunks_verified = copy.num_chunks, copy.num_chunks_verified
        view.num_repairs = copy.num_repairs
    if transfer.ended_at:
        view.ended_s, view.bytes_per_s = now - transfer.ended_at, mean_bytes_per_s(transfer)
    elif copy is not None:
        view.bytes_per_s = measured_bytes_per_s(copy)
        view.left_s = _missing_bytes(copy) / view.bytes_per_s if view.bytes_per_s else 0.0
    return view


def _state(transfer: TransferStatus, is_slow: bool) -> RelayView.State.ValueType:
    if transfer.ended_at:
        return RelayView.STATE_FAILED if transfer.error else RelayView.STATE_FINISHED
    if not transfer.begun_at:
        return RelayView.STATE_PLANNED
    return RelayView.STATE_SLOW if is_slow else RelayView.STATE_RUNNING


def _sources(transfer: TransferStatus) -> list[RelaySource]:
    """By report, and those planned that have not been heard of yet."""
    shares = transfer.copy.shares if transfer.copy else ()
    seen = {share.holder_id for share in shares}
    unseen = [source for source, _ in transfer.feeds if source not in seen]
    planned = [] if transfer.ended_at else [RelaySource(holder_id=source) for source in unseen]
    reported = [
        RelaySource(
            holder_id=share.holder_id,
            num_bytes=share.num_bytes,
            bytes_per_s=share.bytes_per_s,
            following=share.following,
            error=share.error,
        )
        for share in shares
    ]
    return [*reported, *planned]


def _missing_bytes(copy: PackCopy) -> float:
    return copy.pack_bytes * (1 - copy.num_chunks_verified / copy.num_chunks) if copy.num_chunks else 0.0

"""Views of transfers for people: the plan, its progress by the reports, and the time left."""

from __future__ import annotations

from torchrelay.control.v1.scheduler_pb2 import RelaySource, RelayView
from torchrelay.scheduler.policy.relay.transfers import Transfer
from torchrelay.scheduler.policy.state import State


def relay_views(state: State, now: float) -> list[RelayView]:
    """Transfers under way and those that ended within the last seconds."""
    shown = state.transfers.shown(now)
    names = {pack_id: state.model_of_pack(pack_id).name for pack_id in {transfer.pack_id for transfer in shown}}
    return [_view(transfer, names[transfer.pack_id], now) for transfer in shown]


def _view(transfer: Transfer, model: str, now: float) -> RelayView:
    copy = transfer.copy
    view = RelayView(
        pack_id=transfer.pack_id,
        model=model,
        target=transfer.target,
        state=_state(transfer, now),
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
        view.ended_s, view.bytes_per_s = now - transfer.ended_at, transfer.mean_bytes_per_s
    elif copy is not None:
        view.bytes_per_s = copy.bytes_per_s
        view.left_s = copy.missing_bytes / view.bytes_per_s if view.bytes_per_s else 0.0
    return view


def _state(transfer: Transfer, now: float) -> RelayView.State.ValueType:
    if transfer.ended_at:
        return RelayView.STATE_FAILED if transfer.error else RelayView.STATE_FINISHED
    if not transfer.begun_at:
        return RelayView.STATE_PLANNED
    return RelayView.STATE_SLOW if transfer.is_slow(now) else RelayView.STATE_RUNNING


def _sources(transfer: Transfer) -> list[RelaySource]:
    """Sources by report, then planned ones that no report has shown yet."""
    reported_ids = {share.holder_id for share in transfer.shares}
    unseen = [source for source in transfer.sources if source not in reported_ids and not transfer.ended_at]
    reported = [
        RelaySource(
            holder_id=share.holder_id,
            num_bytes=share.num_bytes,
            bytes_per_s=share.bytes_per_s,
            following=share.following,
            error=share.error,
        )
        for share in transfer.shares
    ]
    return [*reported, *(RelaySource(holder_id=source) for source in unseen)]

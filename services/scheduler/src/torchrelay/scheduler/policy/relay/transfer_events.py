"""The turns of relays in words: one happening each, for the history (``relay.event.relay.*``), metrics and the log.

Not for Explain, which tenants read: several of them may have uploaded the model whose pack it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.common.quantities import format_count, format_duration
from torchrelay.scheduler.planning import TransferEdge
from torchrelay.scheduler.policy.core import Model, PackCopy
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.relay.running_relays import RunningRelay
from torchrelay.scheduler.policy.relay.transfers import (
    TransferEvent,
    TransferEventKind,
    TransferStatus,
    sources_dropped,
    sources_joined,
)

EVENT_PREFIX = "relay."  # what the names of all of them begin with
Fields = dict[str, str | int | float]


def transfer_event(told: TransferEvent, model: Model, now: float) -> SchedulerEvent:
    """``kind`` and event bear the turn's name, the subject is the target."""
    transfer = told.transfer
    fields: Fields = {"pack_id": transfer.pack_id, "store_id": transfer.target, "pack_bytes": transfer.pack_bytes}
    brought: Mapping[str, int] = {}
    match told.kind:
        case TransferEventKind.BEGUN:
            reason = _begun_text(transfer)
            urgency = "urgent" if transfer.urgent else "idle"
            fields |= {"sources": ",".join(sources_of(transfer)), "urgency": urgency} | transfer.reason.fields
            fields["planned_bytes_per_s"] = transfer.planned_bytes_per_s
        case TransferEventKind.REPAIRED:
            reason = _repaired_text(transfer, told.before)
            fields |= _repair_fields(transfer.copy, told.before)
        case TransferEventKind.FINISHED | TransferEventKind.FAILED:
            reason = _finished_text(transfer) if told.kind is TransferEventKind.FINISHED else _failed_text(transfer)
            fields |= _end_fields(transfer)
            brought = {share.holder_id: share.num_bytes for share in transfer.copy.shares} if transfer.copy else {}
    kind = f"relay_{told.kind.value}"
    return SchedulerEvent(
        now, kind, model.name, transfer.target, reason, f"{EVENT_PREFIX}{told.kind.value}", fields, brought
    )


def slow_event(
    relay: RunningRelay, measured: float, edge: TransferEdge | None, model: Model, now: float
) -> SchedulerEvent:
    """A relay has departed from its plan for a while. ``arrow``: what it does now; None: nothing better is known."""
    due = _millions(relay.bytes_per_s)
    planned = f"{relay.target} gets {_millions(measured)} MB/s instead of the {due} planned from {relay.upstream}"
    fields: Fields = {
        "pack_id": relay.pack_id,
        "store_id": relay.target,
        "bytes_per_s": measured,
        "planned_bytes_per_s": relay.bytes_per_s,
        "sources": ",".join(source for source, _ in relay.feeds),
        "new_sources": ",".join(edge.striped) if edge else "",
    }
    fields["cause"] = "replanned" if edge else "no_better_source"
    reason = f"{planned}; re-planned: {edge}" if edge else f"{planned}; no better source is known"
    return SchedulerEvent(
        now, "reroute" if edge else "relay_slow", model.name, relay.target, reason, f"{EVENT_PREFIX}slow", fields
    )


def sources_of(transfer: TransferStatus) -> tuple[str, ...]:
    """Whom the target follows, as reported, or else as planned."""
    following = [share.holder_id for share in transfer.copy.shares if share.following] if transfer.copy else []
    planned = [source for source, _ in transfer.feeds]
    return tuple(following or planned or ([transfer.copy.source] if transfer.copy and transfer.copy.source else []))


def _begun_text(transfer: TransferStatus) -> str:
    planned = [source for source, _ in transfer.feeds]  # what is followed first may be a part of it
    edge = f"{' + '.join(planned or sources_of(transfer)) or '?'} -> {transfer.target}"
    text = f"{edge}, {'urgent' if transfer.urgent else 'idle'}, {_millions(transfer.pack_bytes)} MB"
    return f"{text}: {transfer.reason.text}" if transfer.reason.text else text


def _repaired_text(transfer: TransferStatus, before: PackCopy | None) -> str:
    copy = transfer.copy
    assert copy is not None  # a report told of the repair
    new, lost = sources_joined(before, copy), sources_dropped(before, copy)
    whence = f"{transfer.target} goes on from {' and '.join(new)}" if new else f"{transfer.target} goes on"
    if lost:
        return f"{whence}; given up: " + ", ".join(f"{source} ({why})" for source, why in lost.items())
    doubted = _lagging_source(transfer, new)
    return f"{whence}, beside {doubted}" if doubted else whence


def _lagging_source(transfer: TransferStatus, new: tuple[str, ...]) -> str:
    """The source that another was joined for: of those asked before the one that lags most behind its plan."""
    planned = dict(transfer.feeds)
    asked = [share for share in transfer.copy.shares if share.following and share.holder_id not in new]  # type: ignore[union-attr]
    if not asked:
        return ""
    share = min(asked, key=lambda share: share.bytes_per_s / (planned.get(share.holder_id) or 1.0))
    rate = f"{share.holder_id}, which brings {_millions(share.bytes_per_s)} MB/s"
    due = planned.get(share.holder_id, 0.0)
    return f"{rate} of {_millions(due)} planned" if due else rate


def _repair_fields(copy: PackCopy | None, before: PackCopy | None) -> Fields:
    assert copy is not None
    return {
        "cause": "given_up" if sources_dropped(before, copy) else "joined",
        "num_repairs": copy.num_repairs,
        "joined": ",".join(sources_joined(before, copy)),
        "given_up": ",".join(sources_dropped(before, copy)),
        "num_chunks_verified": copy.num_chunks_verified,
        "num_chunks": copy.num_chunks,
    }


def _end_fields(transfer: TransferStatus) -> Fields:
    took_s = transfer.running_s(transfer.ended_at)
    fields: Fields = {
        "took_s": took_s,
        "num_bytes": transfer.num_bytes_received,
        "bytes_per_s": mean_bytes_per_s(transfer),
    }
    if transfer.copy is not None:
        fields["num_repairs"] = transfer.copy.num_repairs
    if transfer.error:
        fields["error"] = transfer.error
    return fields


def mean_bytes_per_s(transfer: TransferStatus) -> float:
    """Over the whole run; 0 where it has none."""
    took_s = transfer.running_s(transfer.ended_at)
    return transfer.num_bytes_received / took_s if took_s > 0 else 0.0


def _finished_text(transfer: TransferStatus) -> str:
    took_s = transfer.running_s(transfer.ended_at)
    rate = _millions(mean_bytes_per_s(transfer))
    moved = f"{_millions(transfer.num_bytes_received)} MB in {format_duration(took_s)}, {rate} MB/s"
    return f"{_edge_with_shares(transfer)}: {moved}{_repairs_text(transfer)}"


def _edge_with_shares(transfer: TransferStatus) -> str:
    shares = [share for share in transfer.copy.shares if share.num_bytes] if transfer.copy else []
    if len(shares) < 2:
        return f"{shares[0].holder_id if shares else ' + '.join(sources_of(transfer)) or '?'} -> {transfer.target}"
    total = sum(share.num_bytes for share in shares)
    parts = [f"{share.holder_id} {_percent(share.num_bytes / total)}" for share in shares]
    return f"{' + '.join(parts)} -> {transfer.target}"


def _percent(share: float) -> str:
    return "<1%" if share < 0.01 else f"{share:.0%}"


def _repairs_text(transfer: TransferStatus) -> str:
    num = transfer.copy.num_repairs if transfer.copy else 0
    return f", {format_count(num, 'repair')}" if num else ""


def _failed_text(transfer: TransferStatus) -> str:
    copy = transfer.copy
    progress = (
        f" with {copy.num_chunks_verified} of {format_count(copy.num_chunks, 'chunk')}"
        if copy and copy.num_chunks
        else ""
    )
    return f"{transfer.target} ended{progress}: {transfer.error}{_repairs_text(transfer)}"


def _millions(value: float) -> str:
    """Millions, with three significant digits and never an exponent."""
    return f"{value / 1e6:.0f}" if value >= 99.5e6 else f"{value / 1e6:.3g}"

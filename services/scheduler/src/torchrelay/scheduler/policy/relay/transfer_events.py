"""Texts of transfer events for the history (``relay.event.relay.*``), metrics and the log.

Not shown by Explain, which tenants read: several tenants may have uploaded the model of the pack.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.common.quantities import format_count, format_duration
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.relay.planning import TransferEdge
from torchrelay.scheduler.policy.relay.transfers import (
    Transfer,
    TransferEvent,
    TransferEventKind,
    sources_dropped,
    sources_joined,
)
from torchrelay.scheduler.policy.types import Model, PackCopy

EVENT_PREFIX = "relay."  # of every topic
Fields = dict[str, str | int | float]


def transfer_event(event: TransferEvent, model: Model, now: float) -> SchedulerEvent:
    """The history's entry; its subject is the target."""
    transfer = event.transfer
    fields: Fields = {"pack_id": transfer.pack_id, "store_id": transfer.target, "pack_bytes": transfer.pack_bytes}
    bytes_by_source: Mapping[str, int] = {}
    match event.kind:
        case TransferEventKind.STARTED:
            reason = _started_text(transfer)
            urgency = "urgent" if transfer.urgent else "idle"
            fields |= {"sources": ",".join(current_sources(transfer)), "urgency": urgency} | transfer.reason.fields
            fields["planned_bytes_per_s"] = transfer.planned_bytes_per_s
        case TransferEventKind.REPAIRED:
            assert transfer.copy is not None  # repairs are known from reports
            reason, repair_fields = _repaired(transfer, transfer.copy, event.before)
            fields |= repair_fields
        case _:
            reason = _failed_text(transfer) if transfer.error else _finished_text(transfer)
            num_bytes, mean_bytes_per_s = transfer.num_bytes_received, transfer.mean_bytes_per_s
            fields["took_s"] = transfer.running_s(transfer.ended_at)
            fields |= {"num_bytes": num_bytes, "bytes_per_s": mean_bytes_per_s}
            fields |= {"num_repairs": transfer.copy.num_repairs} if transfer.copy else {}
            fields |= {"error": transfer.error} if transfer.error else {}
            bytes_by_source = {share.holder_id: share.num_bytes for share in transfer.shares}
    kind, topic = f"relay_{event.kind.value}", f"{EVENT_PREFIX}{event.kind.value}"
    return SchedulerEvent(now, kind, model.name, transfer.target, reason, topic, fields, bytes_by_source)


def slow_event(
    transfer: Transfer, measured: float, edge: TransferEdge | None, model: Model, now: float
) -> SchedulerEvent:
    """A transfer has been slow for a while. ``edge``: its new plan; None if nothing better is known."""
    sources, due = tuple(transfer.sources), _millions(transfer.planned_bytes_per_s)
    planned = f"{transfer.target} gets {_millions(measured)} MB/s instead of the {due} planned from {sources[0]}"
    fields: Fields = {
        "pack_id": transfer.pack_id,
        "store_id": transfer.target,
        "bytes_per_s": measured,
        "planned_bytes_per_s": transfer.planned_bytes_per_s,
        "sources": ",".join(sources),
        "new_sources": ",".join(edge.striped) if edge else "",
        "cause": "replanned" if edge else "no_better_source",
    }
    reason = f"{planned}; re-planned: {edge}" if edge else f"{planned}; no better source is known"
    kind = "reroute" if edge else "relay_slow"
    return SchedulerEvent(now, kind, model.name, transfer.target, reason, f"{EVENT_PREFIX}slow", fields)


def current_sources(transfer: Transfer) -> tuple[str, ...]:
    """The sources that the target follows, as reported or otherwise as planned."""
    following = tuple(share.holder_id for share in transfer.shares if share.following)
    reported = (transfer.copy.source,) if transfer.copy and transfer.copy.source else ()
    return following or tuple(transfer.sources) or reported


def _started_text(transfer: Transfer) -> str:
    # The plan rather than the report, which may first show only some of the sources.
    edge = f"{' + '.join(transfer.sources or current_sources(transfer)) or '?'} -> {transfer.target}"
    text = f"{edge}, {'urgent' if transfer.urgent else 'idle'}, {_millions(transfer.pack_bytes)} MB"
    return f"{text}: {transfer.reason.text}" if transfer.reason.text else text


def _repaired(transfer: Transfer, copy: PackCopy, before: PackCopy | None) -> tuple[str, Fields]:
    new, lost = sources_joined(before, copy), sources_dropped(before, copy)
    text = f"{transfer.target} goes on from {' and '.join(new)}" if new else f"{transfer.target} goes on"
    if lost:
        text += "; given up: " + ", ".join(f"{source} ({error})" for source, error in lost.items())
    elif lagging := _lagging_source(transfer, new):
        text += f", beside {lagging}"
    return text, {
        "cause": "given_up" if lost else "joined",
        "num_repairs": copy.num_repairs,
        "joined": ",".join(new),
        "given_up": ",".join(lost),
        "num_chunks_verified": copy.num_chunks_verified,
        "num_chunks": copy.num_chunks,
    }


def _lagging_source(transfer: Transfer, new: tuple[str, ...]) -> str:
    """The source that a new source joined for: among those followed before, the furthest behind its plan."""
    planned = transfer.sources
    asked = [share for share in transfer.shares if share.following and share.holder_id not in new]
    if not asked:
        return ""
    share = min(asked, key=lambda share: share.bytes_per_s / (planned.get(share.holder_id) or 1.0))
    rate = f"{share.holder_id}, which brings {_millions(share.bytes_per_s)} MB/s"
    due = planned.get(share.holder_id, 0.0)
    return f"{rate} of {_millions(due)} planned" if due else rate


def _finished_text(transfer: Transfer) -> str:
    took_s, rate = transfer.running_s(transfer.ended_at), _millions(transfer.mean_bytes_per_s)
    moved = f"{_millions(transfer.num_bytes_received)} MB in {format_duration(took_s)}, {rate} MB/s"
    num_bytes = {share.holder_id: share.num_bytes for share in transfer.shares if share.num_bytes}
    sources = [*num_bytes] or [*current_sources(transfer)] or ["?"]
    if len(num_bytes) > 1:
        parts = {source: value / sum(num_bytes.values()) for source, value in num_bytes.items()}
        sources = [f"{source} {'<1%' if part < 0.01 else f'{part:.0%}'}" for source, part in parts.items()]
    return f"{' + '.join(sources)} -> {transfer.target}: {moved}{_repairs_text(transfer)}"


def _repairs_text(transfer: Transfer) -> str:
    num = transfer.copy.num_repairs if transfer.copy else 0
    return f", {format_count(num, 'repair')}" if num else ""


def _failed_text(transfer: Transfer) -> str:
    copy, progress = transfer.copy, ""
    if copy and copy.num_chunks:
        progress = f" with {copy.num_chunks_verified} of {format_count(copy.num_chunks, 'chunk')}"
    return f"{transfer.target} ended{progress}: {transfer.error}{_repairs_text(transfer)}"


def _millions(value: float) -> str:
    """Millions with three significant digits, never with an exponent."""
    return f"{value / 1e6:.0f}" if value >= 99.5e6 else f"{value / 1e6:.3g}"

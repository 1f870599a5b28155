"""Replans running transfers that fall behind their plans.

A transfer is slow while it gets less than half of its planned rate and of its sources' own rate. After ``SLOW_AFTER_S``
it is replanned. If the new sources are expected to bring enough more, it switches to them; either way it is left alone
for ``REPLAN_COOLDOWN_S``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.relay.planning import Node, ReceiveProgress, TransferEdge, plan
from torchrelay.scheduler.policy.relay.transfers import Transfer

SLOW_FACTOR = 2.0  # planned rate over measured rate
SLOW_AFTER_S = 1.0
REPLAN_COOLDOWN_S = 5.0
MIN_GAIN = 1.5  # the expected rate of new sources, as a multiple of the measured rate


def with_slowness(
    transfer: Transfer, measured: float, whole: Sequence[str], progress: Mapping[str, ReceiveProgress], now: float
) -> Transfer:
    """The transfer, marked slow or not by this measurement. ``measured``: bytes per second from all its sources.

    A transfer whose sources are slow themselves does not count as slow, because their sources are to be changed.
    """
    incoming = [source for source in transfer.holder_ids if source in progress and source not in whole]
    due = transfer.planned_bytes_per_s
    if incoming and len(incoming) == len(transfer.sources):
        due = min(due, max(progress[source].bytes_per_s for source in incoming))
    if measured * SLOW_FACTOR >= due:
        return replace(transfer, slow_since=0.0) if transfer.slow_since else transfer
    return transfer if transfer.slow_since else replace(transfer, slow_since=now)


def is_slow(transfer: Transfer, now: float) -> bool:
    """Whether the transfer has been slow for ``SLOW_AFTER_S``, or is slow again or still after a replan."""
    has_lasted = now - transfer.slow_since >= SLOW_AFTER_S
    return transfer.slow_since > 0 and (transfer.replan_checked_at > 0 or has_lasted)


def is_replan_due(transfer: Transfer, now: float) -> bool:
    has_lasted = now - transfer.slow_since >= SLOW_AFTER_S
    return transfer.slow_since > 0 and has_lasted and now - transfer.replan_checked_at >= REPLAN_COOLDOWN_S


def replanned_edge(
    transfer: Transfer,
    measured: float,
    whole: Sequence[str],
    receiving: Sequence[str],
    nodes: Mapping[str, Node],
    progress: Mapping[str, ReceiveProgress],
    missing_bytes: float,
) -> TransferEdge | None:
    """The edge that the transfer should have now; None if nothing better is known.

    ``receiving``: all stores that receive the pack, oldest first; stores after the target follow it and are no sources.
    ``nodes``: without the bandwidth that this transfer takes.
    """
    before = receiving[: receiving.index(transfer.target)] if transfer.target in receiving else receiving
    whole = [store for store in whole if store != transfer.target]
    if not whole and not before:
        return None
    edges = plan(whole, before, [transfer.target], nodes=nodes, arriving=progress, num_bytes=missing_bytes)
    edge = next(edge for edge in edges if edge.target == transfer.target)
    same = set(edge.striped) == set(transfer.holder_ids)
    return None if same or edge.bytes_per_s < MIN_GAIN * measured else edge

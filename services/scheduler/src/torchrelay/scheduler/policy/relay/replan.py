"""When a running relay has departed from its plan, and what it should do instead.

on plan -> slow (it gets less than half of what was planned, and of what its sources have) -> after ``SLOW_FOR_S`` its
arrow is drawn anew; if the new sources promise enough more it is told, and left alone for ``HOLD_S``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.planning.edge import TransferEdge
from torchrelay.scheduler.planning.nodes import Node, ReceiveProgress
from torchrelay.scheduler.planning.plan import plan
from torchrelay.scheduler.policy.relay.running_relays import RunningRelay

SLOW_FACTOR = 2.0  # planned over measured
SLOW_AFTER_S = 1.0
REPLAN_COOLDOWN_S = 5.0
MIN_GAIN = 1.5  # what new sources must promise, over what is measured


def with_slowness(
    relay: RunningRelay, measured: float, whole: Sequence[str], arriving: Mapping[str, ReceiveProgress], now: float
) -> RunningRelay:
    """The relay with what this measurement says of it. ``measured``: bytes per second from all its sources.

    A relay whose sources are slow themselves is not the one to be changed: theirs are.
    """
    sources = [source for source, _ in relay.feeds]
    supply = [arriving[source].bytes_per_s for source in sources if source in arriving and source not in whole]
    due = relay.bytes_per_s
    if supply and len(supply) == len(sources):
        due = min(due, max(supply))
    if measured * SLOW_FACTOR >= due:
        return replace(relay, slow_since=0.0) if relay.slow_since else relay
    return relay if relay.slow_since else replace(relay, slow_since=now)


def is_replan_due(relay: RunningRelay, now: float) -> bool:
    slow = relay.slow_since and now - relay.slow_since >= SLOW_AFTER_S
    return bool(slow) and now - relay.replanned_at >= REPLAN_COOLDOWN_S


def replanned_edge(
    relay: RunningRelay,
    measured: float,
    whole: Sequence[str],
    filling: Sequence[str],
    nodes: Mapping[str, Node],
    arriving: Mapping[str, ReceiveProgress],
    missing_bytes: float,
) -> TransferEdge | None:
    """The arrow that the relay should have now; None: nothing better is known.

    ``filling``: all that receive the pack, oldest first; those after the target follow it and are no sources.
    ``nodes``: without what this relay takes.
    """
    before = filling[: filling.index(relay.target)] if relay.target in filling else filling
    whole = [store for store in whole if store != relay.target]
    if not whole and not before:
        return None
    drawn = plan(whole, before, [relay.target], nodes=nodes, arriving=arriving, num_bytes=missing_bytes)
    edge = next(edge for edge in drawn if edge.target == relay.target)
    same = set(edge.striped) == {source for source, _ in relay.feeds}
    return None if same or edge.bytes_per_s < MIN_GAIN * measured else edge

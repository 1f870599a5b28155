"""When a running relay has departed from its plan, and what it should do instead.

on plan -> slow (it gets less than half of what was planned, and of what its sources have) -> after ``SLOW_FOR_S`` its
arrow is drawn anew; if the new sources promise enough more it is told, and left alone for ``HOLD_S``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.planning.arrows import Arrow
from torchrelay.scheduler.planning.nodes import Arriving, Node
from torchrelay.scheduler.planning.plan import plan
from torchrelay.scheduler.planning.running import RunningRelay

DEPARTURE = 2.0  # planned over measured
SLOW_FOR_S = 1.0
HOLD_S = 5.0
WORTH = 1.5  # what new sources must promise, over what is measured


def watched(
    relay: RunningRelay, measured: float, whole: Sequence[str], arriving: Mapping[str, Arriving], now: float
) -> RunningRelay:
    """The relay with what this measurement says of it. ``measured``: bytes per second from all its sources.

    A relay whose sources are slow themselves is not the one to be changed: theirs are.
    """
    sources = [source for source, _ in relay.feeds]
    supply = [arriving[source].bytes_per_s for source in sources if source in arriving and source not in whole]
    due = relay.bytes_per_s
    if supply and len(supply) == len(sources):
        due = min(due, max(supply))
    if measured * DEPARTURE >= due:
        return replace(relay, slow_since=0.0) if relay.slow_since else relay
    return relay if relay.slow_since else replace(relay, slow_since=now)


def is_due(relay: RunningRelay, now: float) -> bool:
    slow = relay.slow_since and now - relay.slow_since >= SLOW_FOR_S
    return bool(slow) and now - relay.replanned_at >= HOLD_S


def redrawn(
    relay: RunningRelay,
    measured: float,
    whole: Sequence[str],
    filling: Sequence[str],
    nodes: Mapping[str, Node],
    arriving: Mapping[str, Arriving],
    missing_bytes: float,
) -> Arrow | None:
    """The arrow that the relay should have now; None: nothing better is known.

    ``filling``: all that receive the pack, oldest first; those after the target follow it and are no sources.
    ``nodes``: without what this relay takes.
    """
    before = filling[: filling.index(relay.target)] if relay.target in filling else filling
    whole = [store for store in whole if store != relay.target]
    if not whole and not before:
        return None
    drawn = plan(whole, before, [relay.target], nodes=nodes, arriving=arriving, num_bytes=missing_bytes)
    arrow = next(arrow for arrow in drawn if arrow.target == relay.target)
    same = set(arrow.striped) == {source for source, _ in relay.feeds}
    return None if same or arrow.bytes_per_s < WORTH * measured else arrow

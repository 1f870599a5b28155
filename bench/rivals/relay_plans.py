"""Relay plans of rival systems: from each host's disk, or along a chain. They predict no rates."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.scheduler.policy.relay.planning import TransferEdge
from torchrelay.scheduler.policy.replication.copies import Copies, CopyKey, CopyOrder
from torchrelay.scheduler.policy.types import REMOTE


def from_disk(
    whole: Sequence[str], receiving: Sequence[str], targets: Sequence[str], **_: object
) -> tuple[TransferEdge, ...]:
    """Plans without relays: each host reads from its own RAM or its own disk."""
    return tuple(_edge(target, REMOTE, whole, receiving) for target in dict.fromkeys(targets))


def by_chain(
    whole: Sequence[str], receiving: Sequence[str], targets: Sequence[str], **_: object
) -> tuple[TransferEdge, ...]:
    """Plans a serial chain: each host follows the host before it; the first follows a whole copy or reads its disk."""
    tail = (*receiving[-1:], *whole[:1], REMOTE)[0]
    edges = []
    for target in dict.fromkeys(targets):
        edge = _edge(target, tail, whole, receiving)
        tail = tail if edge.already_there else target
        edges.append(edge)
    return tuple(edges)


def _edge(target: str, source: str, whole: Sequence[str], receiving: Sequence[str]) -> TransferEdge:
    sources = (REMOTE,) if source in (REMOTE, target) else (source, REMOTE)
    is_whole = target in whole
    return TransferEdge(target, sources, already_there=is_whole or target in receiving, whole=is_whole)


def no_copies(copies: Copies, pack_ids: Sequence[str], under_way: Sequence[CopyKey], now: float) -> Sequence[CopyOrder]:
    """Orders and keeps no copies: packs stay in RAM where instances were loaded, until their space is needed."""
    return ()

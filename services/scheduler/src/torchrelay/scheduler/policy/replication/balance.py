"""Moves kept copies to emptier hosts, one at a time, when nothing else is to be done."""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.scheduler.policy.replication.copy_index import CopyIndex
from torchrelay.scheduler.policy.replication.copy_placement import CopyPlacement

_IMBALANCE = 1.2  # a store this much fuller than the mean gives copies away


def next_move(
    sizes: Mapping[str, int], copy_index: CopyIndex, copy_placement: CopyPlacement
) -> tuple[str, str, str] | None:
    """The largest pack that can move from the fullest store to the emptiest, and these stores' ids; None without one.

    After the move the source is no emptier than the target, so that no move is ever reversed, and the pack is in as
    many failure domains as before.
    """
    live = sorted(copy_index.live, key=lambda store_id: (copy_index.fullness(store_id), store_id))
    if len(live) < 2:
        return None
    target, source = live[0], live[-1]
    mean = sum(map(copy_index.fullness, live)) / len(live)
    if copy_index.fullness(source) <= _IMBALANCE * mean:
        return None
    for pack_id in sorted(copy_index.kept_at(source), key=lambda pack_id: (-sizes[pack_id], pack_id)):
        is_more_even = copy_index.fullness(target, sizes[pack_id]) <= copy_index.fullness(source, -sizes[pack_id])
        can_move = is_more_even and _keeps_domains(copy_index, pack_id, source, target)
        if can_move and copy_placement.has_space(pack_id, target):
            copy_placement.take(pack_id, target)
            return pack_id, source, target
    return None


def _keeps_domains(copy_index: CopyIndex, pack_id: str, source: str, target: str) -> bool:
    copies = copy_index.of(pack_id)
    if not copies.is_settled or any(holder.store_id == target for holder in copies.holders):
        return False
    elsewhere = {holder.domain for holder in copies.kept if holder.store_id != source}
    return copy_index.live[target].domain not in elsewhere or copy_index.live[source].domain in elsewhere

"""Which kept copy would be better off on an emptier host: one at a time, when nothing else is to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrelay.scheduler.berths import Berths
from torchrelay.scheduler.census import Census

_UNEVEN = 1.2  # a store this much fuller than the mean gives copies away


@dataclass(frozen=True)
class Move:
    """A copy of ``pack_id`` on ``target`` lets the one on ``source`` go."""

    pack_id: str
    source: str
    target: str


def lighter_place(sizes: Mapping[str, int], census: Census, berths: Berths) -> Move | None:
    """The largest pack whose move from the fullest to the emptiest store leaves the former no emptier than the latter,
    and the pack in as many failure domains: no move is ever undone.
    """
    live = sorted(census.live, key=lambda store_id: (census.fullness(store_id), store_id))
    if len(live) < 2:
        return None
    target, source = live[0], live[-1]
    mean = sum(map(census.fullness, live)) / len(live)
    if census.fullness(source) <= _UNEVEN * mean:
        return None
    for pack_id in sorted(census.kept_at(source), key=lambda pack_id: (-sizes[pack_id], pack_id)):
        num_bytes = sizes[pack_id]
        evener = census.fullness(target, num_bytes) <= census.fullness(source, -num_bytes)
        if evener and _keeps_domains(census, pack_id, source, target) and berths.has_room(pack_id, target):
            berths.take(pack_id, target)
            return Move(pack_id, source, target)
    return None


def _keeps_domains(census: Census, pack_id: str, source: str, target: str) -> bool:
    copies = census.of(pack_id)
    if not copies.is_settled or any(holder.store_id == target for holder in copies.holders):
        return False
    elsewhere = {holder.domain for holder in copies.kept if holder.store_id != source}
    return census.live[target].domain not in elsewhere or census.live[source].domain in elsewhere

"""Replication: which copies of packs are kept in the hosts' RAM, where new ones are made, and which may go.

Of a pack used of late, ``recent_copies`` are kept, in different failure domains where there are any; of another pack
that lost its last copy with a host, one, while there is room that nobody wants. Kept copies of recent packs are
guarded: their stores evict them last. Copies beyond that are not dropped, they cost nothing until their room is
wanted; so a pack has O(1) copies that take room from others, however many hosts it once ran on.

A copy lost with a host is rebuilt before any other copy is begun. New copies go where the kept ones take the least
part of the arena. A decision never depends on more hosts or domains than there are: it does what it can, and asks for
nothing when nothing can be done.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrelay.scheduler.balancing import lighter_place
from torchrelay.scheduler.berths import Berths
from torchrelay.scheduler.census import Census, PackCopies
from torchrelay.scheduler.core import Store
from torchrelay.scheduler.rules import Rules


class Cause(enum.Enum):
    """Why a copy is made, the most pressing first."""

    REBUILD = "rebuild"  # a copy was lost, and the pack is used
    REPLICATE = "replicate"  # used of late, and not yet in as many places as it should be
    SPREAD = "spread"  # its copies would fail together
    KEEP = "keep"  # not used of late; its last copy was lost
    BALANCE = "balance"  # a fuller host may then let its copy go


@dataclass(frozen=True)
class Pack:
    """A pack that somebody has used, as long as it is remembered."""

    pack_id: str
    num_bytes: int
    last_used: float
    settled: bool = False  # has had all copies it should have: fewer are a loss, not a beginning
    lost: bool = False  # every copy went with a host that did not come back


@dataclass(frozen=True)
class Holdings:
    """What is known of all copies."""

    now: float
    stores: Mapping[str, Store]  # by id
    packs: Sequence[Pack]
    away: frozenset[str] = frozenset()  # stores that fell silent a moment ago: their copies may come back
    under_way: frozenset[tuple[str, str]] = frozenset()  # (pack, store) ordered; no report shows the end
    avoid: frozenset[tuple[str, str]] = frozenset()  # (pack, store) that failed lately


@dataclass(frozen=True)
class CopyOrder:
    """A store is to get a copy of a pack."""

    pack_id: str
    store_id: str
    cause: Cause
    reason: str
    may_evict_guarded: bool = False

    @property
    def urgent(self) -> bool:
        return self.cause is Cause.REBUILD


@dataclass(frozen=True)
class Repair:
    """What is to be done, and what is permitted."""

    orders: tuple[CopyOrder, ...]
    guards: Mapping[str, tuple[str, ...]]  # by store: packs to be kept, in the order in which they go if some must
    released: frozenset[tuple[str, str]]  # (pack, store) of whole copies that may go
    settled: frozenset[str]  # recent packs with all the copies they should have
    num_short: int  # recent packs without


@dataclass(frozen=True)
class _Wish:
    pack: Pack
    copies: PackCopies
    cause: Cause
    reason: str


def repair(holdings: Holdings, rules: Rules) -> Repair:
    """Decides on the whole cluster. ``orders`` are in the order in which they are to be begun."""
    recent_since = holdings.now - rules.recent_s
    packs = sorted(holdings.packs, key=lambda pack: (-pack.last_used, pack.pack_id))
    recent = [pack for pack in packs if pack.last_used >= recent_since]
    others = packs[len(recent) :]
    sizes = {pack.pack_id: pack.num_bytes for pack in packs}
    census = Census(holdings.stores, holdings.away, holdings.under_way, sizes)
    census.choose({pack.pack_id: rules.recent_copies for pack in recent} | {pack.pack_id: 1 for pack in others})
    berths = Berths(census, [pack.pack_id for pack in recent], len(holdings.under_way), holdings.avoid, rules)
    settled = frozenset(pack.pack_id for pack in recent if census.of(pack.pack_id).is_settled)
    orders = _orders(recent, others, census, berths)
    if not orders and not holdings.under_way and (move := lighter_place(sizes, census, berths)):
        orders = [CopyOrder(move.pack_id, move.target, Cause.BALANCE, f"{move.source} is much fuller")]
    return Repair(
        orders=tuple(orders),
        guards=_guards(recent, census),
        released=frozenset(census.released(sizes)),
        settled=settled,
        num_short=len(recent) - len(settled),
    )


def _orders(recent: Sequence[Pack], others: Sequence[Pack], census: Census, berths: Berths) -> list[CopyOrder]:
    """What is lost first; what is not urgent begins only when all of that has."""
    wishes = [wish for pack in recent if (wish := _wish(pack, census))]
    orders = [order for wish in wishes if wish.cause is Cause.REBUILD and (order := _rebuild(wish, berths))]
    if berths.someone_waits:
        return orders
    for cause in (Cause.REPLICATE, Cause.SPREAD):
        orders += [order for wish in wishes if wish.cause is cause and (order := _add(wish, berths))]
    for pack in others:
        lost = pack.lost and not census.of(pack.pack_id).holders
        if lost and (store := berths.find(pack.pack_id, berths.idle_room, urgent=False)):
            berths.take(pack.pack_id, store.store_id)
            reason = "its last copy was lost with a host, and there is room"
            orders.append(CopyOrder(pack.pack_id, store.store_id, Cause.KEEP, reason))
    return orders


def _wish(pack: Pack, census: Census) -> _Wish | None:
    """What a recent pack lacks. A pack whose copies all went by permit comes back when somebody wakes it."""
    copies = census.of(pack.pack_id)
    if not copies.holders:
        return _Wish(pack, copies, Cause.REBUILD, "its last copy was lost with a host") if pack.lost else None
    places = ", ".join(sorted(holder.store_id for holder in copies.holders))
    if copies.num_missing:
        if pack.settled:
            return _Wish(pack, copies, Cause.REBUILD, f"a copy was lost; it is left on {places}")
        return _Wish(pack, copies, Cause.REPLICATE, f"used of late, and only on {places}")
    if len(copies.domains) < min(copies.num_wanted, census.num_domains):
        return _Wish(pack, copies, Cause.SPREAD, f"{places} may fail together")
    return None


def _rebuild(wish: _Wish, berths: Berths) -> CopyOrder | None:
    """A pack without any copy may take the room of guarded ones that are not the last of theirs."""
    pack_id, domains = wish.pack.pack_id, wish.copies.domains
    evicts = False
    store = berths.find(pack_id, berths.room, urgent=True, domains=domains)
    if store is None and not domains and not berths.someone_waits:
        store, evicts = berths.find(pack_id, berths.last_room, urgent=True), True
    if store is None:
        return None
    berths.take(pack_id, store.store_id)
    return CopyOrder(pack_id, store.store_id, wish.cause, wish.reason, evicts)


def _add(wish: _Wish, berths: Berths) -> CopyOrder | None:
    pack_id, spread = wish.pack.pack_id, wish.cause is Cause.SPREAD
    store = berths.find(pack_id, berths.room, urgent=False, domains=wish.copies.domains, strictly=spread)
    if store is None:
        return None
    berths.take(pack_id, store.store_id)
    return CopyOrder(pack_id, store.store_id, wish.cause, wish.reason)


def _guards(recent: Sequence[Pack], census: Census) -> dict[str, tuple[str, ...]]:
    """By store, the recent packs it keeps: first those that are kept elsewhere too, then the last ones; of both the
    longest unused first. What arrives and is wanted is named already.
    """
    spare: dict[str, list[str]] = {store_id: [] for store_id in census.live}
    last: dict[str, list[str]] = {store_id: [] for store_id in census.live}
    for pack in reversed(recent):
        copies = census.of(pack.pack_id)
        wanted = [*copies.kept, *copies.coming[: copies.num_wanted - len(copies.kept)]]
        for rank, holder in enumerate(holder for holder in wanted if not holder.away):
            (spare if rank else last)[holder.store_id].append(pack.pack_id)
    return {store_id: (*spare[store_id], *last[store_id]) for store_id in census.live}

"""Replication: decides which copies of packs to keep in the hosts' RAM, where to make new copies, and which may go.

A pack in demand, used recently or expected to be used soon, keeps ``recent_copies`` copies, in different failure
domains if possible. Any other pack that lost its last copy with a host keeps a single copy, while there is space to
spare. Stores retain the kept copies of packs in demand: they evict them last, the least worth first. Further copies are
not dropped, because they cost nothing until their space is needed. So a pack has O(1) copies that take space from
others, however many hosts it once ran on.

A copy lost with a host is rebuilt before any other copy is begun. New copies go to the store where kept copies take the
smallest share of the arena. With fewer hosts or domains than the goal needs, the decision does what it can and orders
nothing else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.copy_index import CopyIndex, CopySet
from torchrelay.scheduler.policy.replication.copy_placement import CopyPlacement
from torchrelay.scheduler.policy.replication.pack_worth import UNKNOWN, PackWorth
from torchrelay.scheduler.policy.types import CopyCause, StoreStatus

T = TypeVar("T")
_PER_STEP: Final = 4  # looks of a simple loop that take as long as a look elsewhere


@dataclass(frozen=True)
class PackDemand:
    """A remembered pack and its demand."""

    pack_id: str
    num_bytes: int
    last_used: float
    settled: bool = False  # it has had all its copies, so a missing copy was lost
    lost: bool = False  # a copy was lost with a host that did not come back
    worth: PackWorth = UNKNOWN


@dataclass(frozen=True)
class ReplicationInput:
    """Input of a replication decision."""

    now: float
    stores: Mapping[str, StoreStatus]  # by id
    packs: Sequence[PackDemand]
    away: frozenset[str] = frozenset()  # stores that went silent recently: their copies may come back
    under_way: Sequence[tuple[str, str]] = ()  # (pack, store) ordered and not ended, oldest first
    avoid: frozenset[tuple[str, str]] = frozenset()  # (pack, store) that failed recently


@dataclass(frozen=True)
class CopyOrder:
    """A copy of a pack to be made on a store."""

    pack_id: str
    store_id: str
    cause: CopyCause
    reason: str
    may_evict_retained: bool = False

    @property
    def urgent(self) -> bool:
        return self.cause is CopyCause.REBUILD


@dataclass(frozen=True)
class ReplicationPlan:
    """Copies to order and packs to retain; stores may evict all other packs."""

    orders: tuple[CopyOrder, ...] = ()
    retained_packs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by store, in the order of eviction
    disk_order: tuple[str, ...] = ()  # packs, in the order of eviction from any disk
    in_demand: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()  # packs in demand with all the copies they should have

    @property
    def num_short(self) -> int:
        """Packs in demand that lack copies."""
        return len(self.in_demand) - len(self.settled)


@dataclass(frozen=True)
class _MissingCopy:
    pack: PackDemand
    copies: CopySet
    cause: CopyCause
    reason: str


Steps: TypeAlias = Generator[int, None, T]
"""A computation in small steps, each of which yields its work: about as many looks at a copy, a pack or a store."""


def repair(replication_input: ReplicationInput, config: PolicyConfig) -> Steps[ReplicationPlan]:
    """Decides for the whole cluster. ``orders`` come in the order in which to start them."""
    recent_since = replication_input.now - config.recent_s
    packs = yield from _by_worth(replication_input.packs)
    recent, others = list[PackDemand](), list[PackDemand]()
    for pack in packs:
        is_in_demand = pack.last_used >= recent_since or pack.worth.return_s <= config.recent_s
        (recent if is_in_demand else others).append(pack)
    yield len(packs) // _PER_STEP
    sizes = {pack.pack_id: pack.num_bytes for pack in packs}
    copy_index = CopyIndex(replication_input.stores, replication_input.away, sizes)
    for store in replication_input.stores.values():
        copy_index.add(store)
        yield 1 + len(store.copies)
    copy_index.expect_ordered(replication_input.under_way)
    yield from copy_index.choose(
        {pack.pack_id: config.recent_copies for pack in recent} | {pack.pack_id: 1 for pack in others}
    )
    copy_placement = CopyPlacement(copy_index, len(replication_input.under_way), replication_input.avoid, config)
    yield from copy_placement.measure([pack.pack_id for pack in recent])
    settled = frozenset(pack.pack_id for pack in recent if copy_index.of(pack.pack_id).is_settled)
    yield len(recent) // _PER_STEP
    orders = yield from _orders(recent, others, copy_index, copy_placement)
    return ReplicationPlan(
        tuple(orders),
        (yield from _retained_packs(recent, copy_index)),
        _disk_order(packs),
        frozenset(pack.pack_id for pack in recent),
        settled,
    )


def _by_worth(packs: Iterable[PackDemand]) -> Steps[list[PackDemand]]:
    ordered = sorted(packs, key=lambda pack: (-pack.worth.in_ram, -pack.last_used, pack.pack_id))
    yield len(ordered) // _PER_STEP
    return ordered


def _orders(
    recent: Sequence[PackDemand], others: Sequence[PackDemand], copy_index: CopyIndex, copy_placement: CopyPlacement
) -> Steps[list[CopyOrder]]:
    """The copies to order, rebuilds first; other copies start only when all rebuilds have."""
    missing: list[_MissingCopy] = []
    for pack in recent:
        missing += [copy] if (copy := _missing_copy(pack, copy_index)) else []
        yield 1
    for pack in others:
        copies = copy_index.of(pack.pack_id)
        if pack.lost and not copies.holders:
            reason = "its last copy was lost with a host, and there is space"
            missing.append(_MissingCopy(pack, copies, CopyCause.KEEP, reason))
    yield len(others) // _PER_STEP
    orders: list[CopyOrder] = []
    for cause in CopyCause:
        for copy in missing:
            if copy.cause is cause:
                yield 1 if copy_placement.is_full(urgent=False) else len(copy_index.live) // 2
                orders += [order] if (order := _order(copy, copy_placement)) else []
        if cause is CopyCause.REBUILD and copy_placement.copies_wait:
            break
    return orders


def _missing_copy(pack: PackDemand, copy_index: CopyIndex) -> _MissingCopy | None:
    """The copy that a recent pack lacks, if any. A pack whose copies were all evicted with permission is not copied;
    the next cold start loads it again.
    """
    copies = copy_index.of(pack.pack_id)
    if not copies.holders:
        reason = "its last copy was lost with a host"
        return _MissingCopy(pack, copies, CopyCause.REBUILD, reason) if pack.lost else None
    if copies.num_missing:
        if pack.settled:
            return _MissingCopy(pack, copies, CopyCause.REBUILD, f"a copy was lost; it is left on {_places(copies)}")
        return _MissingCopy(pack, copies, CopyCause.REPLICATE, f"in demand, and only on {_places(copies)}")
    if len(copies.domains) < min(copies.num_wanted, copy_index.num_domains):
        return _MissingCopy(pack, copies, CopyCause.SPREAD, f"{_places(copies)} may fail together")
    return None


def _places(copies: CopySet) -> str:
    return ", ".join(sorted(holder.store_id for holder in copies.holders))


def _order(missing: _MissingCopy, copy_placement: CopyPlacement) -> CopyOrder | None:
    """The order for a missing copy, if it has a place. A recent pack without any copy may displace retained copies that
    are not the last of their packs.
    """
    pack_id, domains, cause = missing.pack.pack_id, missing.copies.domains, missing.cause
    urgent, evicts = cause is CopyCause.REBUILD, False
    space = copy_placement.idle_space if cause is CopyCause.KEEP else copy_placement.space
    store = copy_placement.find(pack_id, space, urgent, domains, strictly=cause is CopyCause.SPREAD)
    if urgent and store is None and not domains and not copy_placement.copies_wait:
        store, evicts = copy_placement.find(pack_id, copy_placement.last_space, urgent), True
    if store is None:
        return None
    copy_placement.take(pack_id, store.store_id)
    return CopyOrder(pack_id, store.store_id, cause, missing.reason, evicts)


def _retained_packs(recent: Sequence[PackDemand], copy_index: CopyIndex) -> Steps[dict[str, tuple[str, ...]]]:
    """The packs in demand that each store keeps, in the order of eviction: first packs that are kept elsewhere too,
    then packs with no other kept copy, each group by rising worth. Includes wanted copies that are still incoming.
    """
    spare: dict[str, list[str]] = {store_id: [] for store_id in copy_index.live}
    last: dict[str, list[str]] = {store_id: [] for store_id in copy_index.live}
    for pack in reversed(recent):
        copies = copy_index.of(pack.pack_id)
        wanted = [*copies.kept, *copies.incoming_copies[: copies.num_wanted - len(copies.kept)]]
        for rank, holder in enumerate(holder for holder in wanted if not holder.away):
            (spare if rank else last)[holder.store_id].append(pack.pack_id)
        yield 2
    return {store_id: (*spare[store_id], *last[store_id]) for store_id in copy_index.live}


def _disk_order(packs: Sequence[PackDemand]) -> tuple[str, ...]:
    """The packs by rising worth on a disk."""
    ordered = sorted(packs, key=lambda pack: (pack.worth.on_disk, pack.last_used, pack.pack_id))
    return tuple(pack.pack_id for pack in ordered)

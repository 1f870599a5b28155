"""Relays that run: with the stores' reports they make the holder directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchrelay.scheduler.planning.edge import TransferEdge
from torchrelay.scheduler.planning.nodes import DEFAULT_BYTES_PER_S, ReceiveProgress
from torchrelay.scheduler.policy.core import PackCopy, StoreStatus


@dataclass(frozen=True)
class RunningRelay:
    """An arrow whose bytes are still flowing. ``feeds`` are its striped sources with their planned rates."""

    pack_id: str
    target: str
    upstream: str
    started_at: float
    feeds: tuple[tuple[str, float], ...] = ()
    bytes_per_s: float = 0.0  # as planned; 0: not predicted
    urgent: bool = True  # somebody waits for it
    slow_since: float = 0.0  # 0: it keeps to its plan
    replanned_at: float = 0.0  # 0: never

    @classmethod
    def of(cls, pack_id: str, edge: TransferEdge, now: float, urgent: bool) -> RunningRelay:
        rates = [share * edge.bytes_per_s for share in edge.shares]
        feeds = tuple(zip(edge.striped, rates, strict=True))
        return cls(pack_id, edge.target, edge.upstream, now, feeds, edge.bytes_per_s, urgent)


class RunningRelays:
    """Arrows started and not ended yet."""

    _UNSEEN_S = 10.0  # an arrow whose target never reports the pack is dropped after this time

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RunningRelay] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, pack_id: str, edges: Iterable[TransferEdge], now: float, urgent: bool = True) -> None:
        for edge in edges:
            if not edge.already_there:
                self._running[(pack_id, edge.target)] = RunningRelay.of(pack_id, edge, now, urgent)

    def mark_urgent(self, pack_id: str, target: str) -> None:
        """Somebody waits for it by now."""
        if relay := self._running.get((pack_id, target)):
            self._running[(pack_id, target)] = replace(relay, urgent=True)

    def put(self, relay: RunningRelay) -> None:
        """A relay that was changed; without effect when it has ended."""
        if (relay.pack_id, relay.target) in self._running:
            self._running[(relay.pack_id, relay.target)] = relay

    def restart(self, pack_id: str, edge: TransferEdge, now: float) -> None:
        """The relay goes on with other sources. It keeps its age, which is its place among those that fill."""
        before = self._running[(pack_id, edge.target)]
        again = RunningRelay.of(pack_id, edge, before.started_at, before.urgent)
        self.put(replace(again, replanned_at=now))

    def replan_checked(self, relay: RunningRelay, now: float) -> None:
        """Its departure was looked into: it is left alone for a while."""
        self.put(replace(relay, slow_since=0.0, replanned_at=now))

    def drop(self, pack_id: str, target: str) -> None:
        """The relay could not be started, or its store is gone."""
        self._running.pop((pack_id, target), None)

    def observe(self, store: StoreStatus, now: float) -> None:
        """Ends the arrows into ``store`` that its report shows as ended."""
        for relay in self.into(store.store_id):
            copy = store.copies.get(relay.pack_id)
            unseen = copy is None and now - relay.started_at > self._UNSEEN_S
            if unseen or (copy is not None and not copy.receiving):
                self.drop(relay.pack_id, relay.target)

    def lose(self, store_id: str) -> None:
        for relay in self.into(store_id):
            self.drop(relay.pack_id, relay.target)

    def into(self, store_id: str) -> list[RunningRelay]:
        return [relay for relay in self._running.values() if relay.target == store_id]

    def running(self) -> list[RunningRelay]:
        return list(self._running.values())

    def outgoing(self) -> Counter[str]:
        """Copies each store sends now."""
        return Counter(source for relay in self._running.values() for source, _ in relay.feeds)

    def filling(self, pack_id: str, stores: Iterable[StoreStatus]) -> tuple[str, ...]:
        """Stores that are receiving the pack, by arrows and by reports, oldest first."""
        begun = {
            store.store_id: copy.relay_begin_us / 1e6
            for store in stores
            if (copy := store.copies.get(pack_id)) and copy.receiving
        }
        begun |= {relay.target: relay.started_at for relay in self._running.values() if relay.pack_id == pack_id}
        # Of one plan, each was started before those it feeds.
        order = {key[1]: rank for rank, key in enumerate(self._running) if key[0] == pack_id}
        return tuple(sorted(begun, key=lambda store_id: (begun[store_id], order.get(store_id, -1), store_id)))

    def arriving(self, pack_id: str, stores: Iterable[StoreStatus]) -> dict[str, ReceiveProgress]:
        """How far the copies are that are being received: as reported, at the measured rate or else the planned one."""
        found = {}
        for store in stores:
            copy = store.copies.get(pack_id)
            relay = self._running.get((pack_id, store.store_id))
            if relay is not None or (copy is not None and copy.receiving):
                planned = relay.bytes_per_s if relay else 0.0
                measured = measured_bytes_per_s(copy) if copy else 0.0
                have = copy.num_chunks_verified / copy.num_chunks if copy and copy.num_chunks else 0.0
                found[store.store_id] = ReceiveProgress(have, measured or planned or DEFAULT_BYTES_PER_S)
        return found


def measured_bytes_per_s(copy: PackCopy) -> float:
    """What all sources of a copy bring together, of late."""
    return sum(share.bytes_per_s for share in copy.shares)


def whole_holders(pack_id: str, stores: Iterable[StoreStatus]) -> tuple[str, ...]:
    """Stores that have all of the pack."""
    return tuple(store.store_id for store in stores if pack_id in store.copies and store.copies[pack_id].complete)

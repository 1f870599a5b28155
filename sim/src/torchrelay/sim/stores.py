"""Simulated stores: a host's arena, and relays into it over shared links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.inputs import CommandEnded, CommandOutcome
from torchrelay.scheduler.policy.types import REMOTE, Model, PackCopy, Peer, SourceShare, StoreStatus
from torchrelay.sim.events import EventQueue
from torchrelay.sim.flows import NUM_CHUNKS, FluidNetwork, Link, Stream, Transfer
from torchrelay.sim.scenario import Fleet, ServedModel
from torchrelay.sim.scheduler import SimulatedScheduler
from torchrelay.sim.spent import Meter


@dataclass(eq=False)
class SimulatedStore:
    """The store of one host."""

    host_id: str
    store_id: str
    copies: dict[str, Transfer | None] = field(default_factory=dict)  # by pack, least recently used first; None: whole
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # followed at the same time, by pack
    idle: set[str] = field(default_factory=set)  # packs that arrive with the bandwidth that others leave
    retained: tuple[str, ...] = ()
    pins: dict[str, str] = field(default_factory=dict)  # packs in the slots of the host's workers, by worker
    num_starts: int = 1  # of its process
    is_up: bool = True
    _waiting: dict[str, dict[str, Callable[[], None]]] = field(default_factory=dict)  # by pack and worker

    def when_whole(self, pack_id: str, worker_id: str, call: Callable[[], None]) -> None:
        """Calls now if the pack is whole, otherwise once it is."""
        if self.copies.get(pack_id) is None:
            call()
        else:
            self._waiting.setdefault(pack_id, {})[worker_id] = call

    def cancel_wait(self, pack_id: str, worker_id: str) -> None:
        self._waiting.get(pack_id, {}).pop(worker_id, None)

    def set_whole(self, pack_id: str) -> None:
        self.copies[pack_id] = None
        for call in list(self._waiting.pop(pack_id, {}).values()):
            call()

    def pinned(self) -> set[str]:
        return set(self.pins.values())


class SimulatedStores:
    """All stores, because a relay reads from the stores that it follows."""

    def __init__(
        self,
        events: EventQueue,
        fleet: Fleet,
        served: Mapping[str, ServedModel],
        meter: Meter,
        scheduler: SimulatedScheduler,
    ) -> None:
        self._events, self._fleet, self._served = events, fleet, served
        self._meter, self._scheduler = meter, scheduler
        self.of = {f"store-{n}": SimulatedStore(f"host-{n}", f"store-{n}") for n in range(fleet.num_hosts)}
        capacity: dict[Link, float] = {}
        for store_id in self.of:
            capacity |= {
                ("out", store_id): fleet.nic_bytes_per_s,
                ("in", store_id): fleet.nic_bytes_per_s,
                ("disk", store_id): fleet.disk_bytes_per_s,
            }
        self.network = FluidNetwork(events, capacity)

    def hold(self, store: SimulatedStore, pack_ids: Iterable[str]) -> None:
        """Adds whole copies, retained as by an earlier scheduler."""
        store.retained = tuple(pack_ids)
        for pack_id in store.retained:
            self._meter.change_ram(self._pack_bytes(pack_id))
            store.copies[pack_id] = None

    # Commands

    def copy(self, command: effects.CopyCommand) -> None:
        store = self.of[command.hop.store_id]
        is_held = command.model.pack_id in store.copies
        has_space = is_held or not command.keep_retained or self._has_space(store, command.model)
        if not (has_space and store.is_up):
            why = "no space" if store.is_up else "its store is not reached"
            self._scheduler.apply(
                CommandEnded(inputs.Copy(command.model.pack_id, store.store_id), CommandOutcome.REFUSED, why)
            )
            return
        self.relay(command.model, command.hop, is_idle=not command.urgent)
        self._scheduler.apply(CommandEnded(inputs.Copy(command.model.pack_id, store.store_id), CommandOutcome.ACCEPTED))

    def reroute(self, command: effects.RerouteCommand) -> None:
        store, pack_id = self.of[command.hop.store_id], command.model.pack_id
        transfer = store.copies.get(pack_id)
        if transfer is not None and not transfer.is_complete:
            store.idle = store.idle - {pack_id} if command.urgent else store.idle | {pack_id}
            self._redirect(store, pack_id, transfer, command.hop.sources, command.hop.num_striped)

    def retain(self, command: effects.RetainCommand) -> None:
        self.of[command.store_id].retained = command.pack_ids

    def relay(self, model: Model, hop: effects.Hop, *, is_idle: bool = False) -> None:
        """Starts a relay or joins the present one. ``is_idle``: nothing waits for it."""
        store, pack_id = self.of[hop.store_id], model.pack_id
        if pack_id in store.copies:
            transfer = store.copies[pack_id] = store.copies.pop(pack_id)  # now the most recently used
            if transfer is not None and pack_id in store.idle and not is_idle:
                store.idle.remove(pack_id)
                sources = store.sources[pack_id]
                self._redirect(store, pack_id, transfer, sources, len(sources))
            return
        if is_idle:
            store.idle.add(pack_id)
        self._free_space(store, model)
        self._meter.change_ram(model.pack_bytes)
        sources = self._holders(store, pack_id, hop.sources, hop.num_striped)
        store.sources[pack_id] = sources
        streams = self._streams(store, pack_id, sources)
        store.copies[pack_id] = self.network.begin(model.pack_bytes, streams, partial(self._arrived, store, pack_id))
        self._report(store)

    # Failures

    def fail(self, store: SimulatedStore, *, is_noticed: bool) -> None:
        """Ends the store's process with its copies; what others receive from it goes on from elsewhere. ``is_noticed``:
        the scheduler need not wait for silence.
        """
        copies, store.copies, store.is_up = store.copies, {}, False
        for other in self.of.values():
            for pack_id, transfer in other.copies.items():
                sources = other.sources.get(pack_id, ())
                if transfer is not None and store.store_id in sources:
                    self._redirect(other, pack_id, transfer, sources, len(sources))
        for pack_id, transfer in copies.items():
            self._meter.change_ram(-self._pack_bytes(pack_id))
            if transfer is not None:
                self.network.abort(transfer)
        store.retained = ()
        store.idle.clear()
        if is_noticed:
            self._scheduler.apply(inputs.PeerGone(Peer(store.store_id, is_store=True)))

    def start(self, store: SimulatedStore) -> None:
        """Starts the process of a store that failed, without copies."""
        store.is_up = True
        store.num_starts += 1
        self._report(store)

    # Transfers

    def _holders(self, store: SimulatedStore, pack_id: str, sources: Iterable[str], number: int) -> tuple[str, ...]:
        """The first ``number`` sources that have the pack or receive it; the disk if there are none."""
        peers = [source for source in sources if source not in (REMOTE, store.store_id)]
        return tuple([peer for peer in peers if pack_id in self.of[peer].copies][: max(number, 1)]) or (REMOTE,)

    def _redirect(
        self, store: SimulatedStore, pack_id: str, transfer: Transfer, sources: Iterable[str], number: int
    ) -> None:
        """Lets the transfer follow the first ``number`` sources that have the pack by now."""
        store.sources[pack_id] = self._holders(store, pack_id, sources, number)
        self.network.redirect(transfer, self._streams(store, pack_id, store.sources[pack_id]))

    def _streams(self, store: SimulatedStore, pack_id: str, sources: Sequence[str]) -> list[Stream]:
        into, is_idle = ("in", store.store_id), pack_id in store.idle
        return [
            Stream((("disk", store.store_id),), is_idle=is_idle)
            if source == REMOTE
            else Stream((("out", source), into), self.of[source].copies[pack_id], is_idle)
            for source in sources
        ]

    def _arrived(self, store: SimulatedStore, pack_id: str) -> None:
        store.idle.discard(pack_id)
        store.set_whole(pack_id)
        self._report(store)

    # Space in the arena

    def _has_space(self, store: SimulatedStore, model: Model) -> bool:
        kept = store.pinned() | set(store.retained)
        used = sum(self._pack_bytes(pack_id) for pack_id in store.copies if pack_id in kept)
        return used + model.pack_bytes <= self._fleet.arena_bytes

    def _free_space(self, store: SimulatedStore, model: Model) -> None:
        """Evicts unpinned packs for the model's, packs that are not retained first, then the least recently used."""
        used = sum(map(self._pack_bytes, store.copies))
        pinned = store.pinned()
        for pack_id in sorted(store.copies, key=lambda pack_id: pack_id in store.retained):
            if used + model.pack_bytes <= self._fleet.arena_bytes:
                return
            if pack_id not in pinned and store.copies[pack_id] is None:
                self._meter.change_ram(-self._pack_bytes(pack_id))
                del store.copies[pack_id]
                used -= self._pack_bytes(pack_id)

    def _pack_bytes(self, pack_id: str) -> int:
        return self._served[pack_id].pack_bytes

    # Reports

    def report_all(self) -> None:
        for store in self.of.values():
            if store.is_up:
                self._scheduler.apply(inputs.StoreReported(self._status(store), streamed=True))

    def _report(self, store: SimulatedStore) -> None:
        if store.is_up:
            self._scheduler.soon(inputs.StoreReported(self._status(store), streamed=True))

    def _status(self, store: SimulatedStore) -> StoreStatus:
        pinned = store.pinned()
        return StoreStatus(
            store_id=store.store_id,
            incarnation=f"{store.store_id} {store.num_starts}",
            host_id=store.host_id,
            grpc_address=store.store_id,
            data_address=store.store_id,
            seen_at=self._events.now,
            arena_target_bytes=self._fleet.arena_bytes,
            copies={pack_id: self._copy_status(store, pack_id, pack_id in pinned) for pack_id in store.copies},
            failure_domain=store.host_id,
        )

    def _copy_status(self, store: SimulatedStore, pack_id: str, is_pinned: bool) -> PackCopy:
        transfer, size = store.copies[pack_id], self._pack_bytes(pack_id)
        if transfer is None:
            return PackCopy(pack_id, size, NUM_CHUNKS, NUM_CHUNKS, int(is_pinned), retained=pack_id in store.retained)
        verified = int(self.network.received(transfer) / size * NUM_CHUNKS)
        shares = tuple(
            SourceShare(source, 0, stream.bytes_per_s, following=True)
            for source, stream in zip(store.sources[pack_id], transfer.streams, strict=True)
        )
        return PackCopy(pack_id, size, NUM_CHUNKS, verified, 1, source=store.sources[pack_id][0], shares=shares)

"""Transfers of packs into stores, from plan to end.

    PLANNED --accepted--> ACCEPTED
       |                     |
       +---------------------+--first chunk requested--> RUNNING --last chunk verified--> FINISHED
       |                     |                              |
       `---------------------+------------------------------+--> FAILED

    FAILED: refused, an error before the begin, or no begin within ``START_TIMEOUT_S`` (PLANNED, ACCEPTED);
            an error, dropped, begun anew (RUNNING); the store is lost (any state)
    MISSING: RUNNING within ``START_TIMEOUT_S`` of its plan, and absent from a report; then RUNNING again, or FAILED

Plans start a transfer (``plan``), the outcome of the command confirms or refuses it (``accepted``, ``refused``), and
the target's reports move it on (``observe``). Only the replicator's orders become ACCEPTED: nothing confirms the relays
of a load. Transfers that another scheduler ordered are known from reports alone: they have no planned sources, and are
RUNNING when first seen.

A store's reports come on two paths and may overtake each other, so one without a young copy may be older than it. The
history records the copy as dropped, and its return as another begin; plan and order stand until the time is up.

Pack and target identify a transfer. ``relay_begin_us`` tells its runs apart, because the record of a run stays in the
reports until the next one begins. It is a stamp by the target's clock, compared only with others of the same target.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from torchrelay.scheduler.policy.reasons import NO_REASON, Reason
from torchrelay.scheduler.policy.relay.planning import DEFAULT_BYTES_PER_S, ReceiveProgress, TransferEdge
from torchrelay.scheduler.policy.relay.source_changes import is_repair_complete
from torchrelay.scheduler.policy.types import CopyCause, PackCopy, SourceShare, StoreStatus

ENDED_SHOWN_S = 6.0  # how long an ended transfer is shown
START_TIMEOUT_S = 10.0  # a transfer that its store does not begin within this time has failed
_MAX_ENDED = 64

TransferKey = tuple[str, str]  # pack, target


class PlannedSource(NamedTuple):
    """A store, or REMOTE, and the rate at which it is planned to send."""

    holder_id: str
    bytes_per_s: float


def planned_sources(edge: TransferEdge) -> tuple[PlannedSource, ...]:
    """The striped sources of an edge with their planned rates."""
    pairs = zip(edge.striped, edge.shares, strict=True)
    return tuple(PlannedSource(source, share * edge.bytes_per_s) for source, share in pairs)


class TransferState(enum.Enum):
    PLANNED = "planned"
    ACCEPTED = "accepted"
    RUNNING = "running"
    MISSING = "missing"
    FINISHED = "finished"
    FAILED = "failed"


class TransferEventKind(enum.Enum):
    """The events of a transfer; the values are the history's."""

    STARTED = "started"
    REPAIRED = "repaired"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class Transfer:
    """A store's incoming copy of a pack. Times are the scheduler's; 0 means not yet."""

    pack_id: str
    target: str
    pack_bytes: int
    planned_at: float  # or first reported
    sources: tuple[PlannedSource, ...] = ()  # as planned; empty: the plan is not known
    planned_bytes_per_s: float = 0.0  # 0: not predicted
    urgent: bool = True  # a request waits for it: its store runs it before idle transfers
    reason: Reason = NO_REASON
    cause: CopyCause | None = None  # the replicator's, if it ordered this copy
    rank: int = 0  # by age; older transfers have lower ranks
    stale_begin_us: int | None = None  # of the record left by an earlier run; None: there was none
    accepted_at: float = 0.0
    begun_at: float = 0.0
    missing: bool = False  # it has begun, and was absent from the last report
    copy: PackCopy | None = None  # as last reported
    repair_base: PackCopy | None = None  # the copy as of the last repair event: what the next repair is compared with
    slow_since: float = 0.0  # 0: it keeps to its plan
    replan_checked_at: float = 0.0  # when new sources were last looked for; 0: never
    num_replans: int = 0
    ended_at: float = 0.0
    error: str = ""

    @property
    def key(self) -> TransferKey:
        return self.pack_id, self.target

    @property
    def state(self) -> TransferState:
        if self.ended_at:
            return TransferState.FAILED if self.error else TransferState.FINISHED
        if self.missing:
            return TransferState.MISSING
        if self.begun_at:
            return TransferState.RUNNING
        return TransferState.ACCEPTED if self.accepted_at else TransferState.PLANNED

    @property
    def holder_ids(self) -> tuple[str, ...]:
        """The planned sources."""
        return tuple(source.holder_id for source in self.sources)

    def running_s(self, now: float) -> float:
        """Time since it began; once it has finished, the duration that its store measured."""
        if self.copy is not None and self.copy.relay_end_us:
            return (self.copy.relay_end_us - self.copy.relay_begin_us) / 1e6
        return (self.ended_at or now) - self.begun_at if self.begun_at else 0.0

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """The shares of the sources, as last reported."""
        return self.copy.shares if self.copy else ()

    @property
    def num_bytes_received(self) -> int:
        """Bytes received by this run; bytes from an earlier run are not fetched again."""
        is_complete = self.copy is not None and self.copy.complete
        return sum(share.num_bytes for share in self.shares) or (self.pack_bytes if is_complete else 0)

    @property
    def mean_bytes_per_s(self) -> float:
        """Over the whole run; 0 if it never ran."""
        took_s = self.running_s(self.ended_at)
        return self.num_bytes_received / took_s if took_s > 0 else 0.0


@dataclass(frozen=True)
class TransferEvent:
    """A step of a transfer."""

    kind: TransferEventKind
    transfer: Transfer
    before: PackCopy | None = None  # for REPAIRED: the copy as of the last event
    in_history: bool = True  # False if no bytes had to flow, or if its end is recorded already


def _remove(index: dict[str, dict[TransferKey, None]], names: Iterable[str], key: TransferKey) -> None:
    for name in names:
        del index[name][key]
        if not index[name]:
            del index[name]


def _is_young(transfer: Transfer, now: float) -> bool:
    return now - (transfer.accepted_at or transfer.planned_at) <= START_TIMEOUT_S


class Transfers:
    """All transfers that have not ended, and the last that have. Owned by the state."""

    def __init__(self) -> None:
        self._running: dict[TransferKey, Transfer] = {}
        self._into: dict[str, dict[TransferKey, None]] = {}  # running transfers, by target
        self._out_of: dict[str, dict[TransferKey, None]] = {}  # by planned source
        self._of_pack: dict[str, dict[TransferKey, None]] = {}
        self._ended: deque[Transfer] = deque(maxlen=_MAX_ENDED)
        self._ranks = count(1)

    # Plans and commands

    def plan(
        self,
        pack_id: str,
        pack_bytes: int,
        edges: Iterable[TransferEdge],
        stores: Mapping[str, StoreStatus],
        now: float,
        *,
        urgent: bool = True,
        reason: Reason = NO_REASON,
        cause: CopyCause | None = None,
    ) -> None:
        """Counts planned edges as started. An edge on its way already keeps its sources and takes on the new demand."""
        for edge in edges:
            key = pack_id, edge.target
            running = self._running.get(key)
            if edge.already_there and running is not None:
                self._run(replace(running, urgent=running.urgent or urgent, cause=cause or running.cause))
            elif not edge.already_there or cause is not None:
                earlier = stores[edge.target].copies.get(pack_id) if edge.target in stores else None
                planned = Transfer(
                    *key,
                    pack_bytes,
                    planned_at=now,
                    sources=() if edge.already_there else planned_sources(edge),
                    planned_bytes_per_s=0.0 if edge.already_there else edge.bytes_per_s,
                    urgent=urgent,
                    reason=reason,
                    cause=cause,
                    rank=next(self._ranks),
                    stale_begin_us=earlier.relay_begin_us if earlier else None,
                )
                self._run(planned)

    def accepted(self, key: TransferKey, now: float) -> None:
        """Records that the store accepted the replicator's order."""
        if transfer := self._running.get(key):
            self._run(replace(transfer, accepted_at=now))

    def refused(self, key: TransferKey, error: str, now: float) -> list[TransferEvent]:
        """Ends a transfer whose store could not be reached or refused the relay; no effect on one that has begun."""
        transfer = self._running.get(key)
        return [self._end(transfer, now, error)] if transfer is not None and not transfer.begun_at else []

    def put(self, transfer: Transfer) -> None:
        """Replaces a transfer; no effect if it has ended."""
        if transfer.key in self._running:
            self._run(transfer)

    def _run(self, transfer: Transfer) -> None:
        before = self._running.get(transfer.key)
        if before is not None and before.sources != transfer.sources:
            _remove(self._out_of, before.holder_ids, before.key)
        self._running[transfer.key] = transfer
        self._into.setdefault(transfer.target, {})[transfer.key] = None
        self._of_pack.setdefault(transfer.pack_id, {})[transfer.key] = None
        for source in transfer.holder_ids:
            self._out_of.setdefault(source, {})[transfer.key] = None

    def _stop(self, transfer: Transfer) -> None:
        if (ended := self._running.pop(transfer.key, None)) is not None:
            _remove(self._into, (ended.target,), ended.key)
            _remove(self._of_pack, (ended.pack_id,), ended.key)
            _remove(self._out_of, ended.holder_ids, ended.key)

    # Reports

    def observe(self, store: StoreStatus, before: StoreStatus | None, now: float) -> list[TransferEvent]:
        """Applies a report. ``before``: the store's previous one; without it, what runs was running already."""
        events: list[TransferEvent] = []
        for copy in store.copies.values():
            key = (copy.pack_id, store.store_id)
            if key not in self._running and (unplanned := self._unplanned(copy, store.store_id, before, now)):
                self._run(unplanned)
            if transfer := self._running.get(key):
                events += self._advance(transfer, copy, now)
        for transfer in self.into(store.store_id):
            if transfer.begun_at:
                if transfer.pack_id not in store.copies:
                    events.append(self._drop(transfer, now))
            elif self._is_overdue(transfer, store.copies.get(transfer.pack_id), now):
                error = "the store does not report it" if transfer.accepted_at else "its store has not begun it"
                events.append(self._end(transfer, now, error))
        return events

    def lost(self, store_id: str, error: str, now: float) -> list[TransferEvent]:
        """Ends all transfers into a store that is gone or silent."""
        return [self._end(transfer, now, error) for transfer in self.into(store_id)]

    def _drop(self, transfer: Transfer, now: float) -> TransferEvent:
        """Ends a running transfer that is absent from a report; a young transfer waits for its return."""
        returns = bool(transfer.sources) and _is_young(transfer, now)
        event = self._end(replace(transfer, cause=None) if returns else transfer, now, "it was dropped")
        if returns:
            waiting = replace(transfer, missing=True, begun_at=0.0, copy=None, repair_base=None, stale_begin_us=None)
            self._run(waiting)
        return event

    @staticmethod
    def _is_overdue(transfer: Transfer, copy: PackCopy | None, now: float) -> bool:
        """Whether a transfer that has not begun is given up."""
        # A copy whose range is still being reserved is in the report, and may take long: memory is faulted in.
        if copy is not None and copy.receiving:
            return False
        # The answer to an order has a deadline of its own, which grows with the pack.
        since = transfer.planned_at if transfer.cause is None else transfer.accepted_at
        return bool(since) and now - since > START_TIMEOUT_S

    def _advance(self, transfer: Transfer, copy: PackCopy, now: float) -> Iterator[TransferEvent]:
        if not transfer.begun_at:
            if copy.relay_begin_us in (0, transfer.stale_begin_us):
                if copy.complete:  # it was there already
                    self._stop(transfer)
                    yield TransferEvent(TransferEventKind.FINISHED, transfer, in_history=False)
                elif copy.error and copy.relay_begin_us != transfer.stale_begin_us:
                    yield self._end(replace(transfer, copy=copy), now, copy.error)
                return
            num_bytes = copy.pack_bytes or transfer.pack_bytes
            transfer = replace(transfer, begun_at=now, missing=False, copy=copy, pack_bytes=num_bytes)
            yield TransferEvent(TransferEventKind.STARTED, transfer)
        elif copy.relay_begin_us == transfer.stale_begin_us and _is_young(transfer, now):
            return  # an older report, from before the begin
        elif transfer.copy is not None and copy.relay_begin_us != transfer.copy.relay_begin_us and not copy.error:
            if copy.relay_begin_us:  # one run ended and another began between two reports
                yield self._end(replace(transfer, cause=None), now, "it was begun anew")
                again = replace(transfer, begun_at=0.0, copy=None, repair_base=None)
                self._run(again)
                yield from self._advance(again, copy, now)
            elif copy.complete:  # a restarted store found it whole in its arena
                yield self._end(replace(transfer, copy=copy), now, "")
            return
        before, transfer = transfer.repair_base, replace(transfer, copy=copy)
        is_over = copy.complete or bool(copy.error)
        if copy.num_repairs > (before.num_repairs if before else 0):
            if is_over or is_repair_complete(before, copy):
                transfer = replace(transfer, repair_base=copy)
                yield TransferEvent(TransferEventKind.REPAIRED, transfer, before)
        else:
            transfer = replace(transfer, repair_base=copy)
        self._run(transfer)
        if is_over:
            yield self._end(transfer, now, copy.error)

    def _unplanned(self, copy: PackCopy, target: str, before: StoreStatus | None, now: float) -> Transfer | None:
        """A transfer that no plan of ours began, if the copy shows one: new since the last report, or receiving."""
        known = before.copies.get(copy.pack_id) if before else None
        seen = known is not None and known.relay_begin_us == copy.relay_begin_us
        if not copy.relay_begin_us or seen or (before is None and not copy.receiving):
            return None
        transfer = Transfer(copy.pack_id, target, copy.pack_bytes, now, rank=next(self._ranks))
        return transfer if before else replace(transfer, begun_at=now, copy=copy, repair_base=copy)

    def _end(self, transfer: Transfer, now: float, error: str) -> TransferEvent:
        self._stop(transfer)
        ended = replace(transfer, ended_at=now, error=error)
        if not transfer.missing:
            self._ended.append(ended)
        kind = TransferEventKind.FAILED if error else TransferEventKind.FINISHED
        return TransferEvent(kind, ended, in_history=not transfer.missing)

    # Queries

    @property
    def num_running(self) -> int:
        """Number of planned, accepted and running transfers."""
        return sum(not transfer.missing for transfer in self._running.values())

    @property
    def ordered(self) -> tuple[TransferKey, ...]:
        """The replicator's orders, oldest first."""
        return tuple(key for key, transfer in self._running.items() if transfer.cause is not None)

    def get(self, key: TransferKey) -> Transfer | None:
        return self._running.get(key)

    def into(self, store_id: str) -> list[Transfer]:
        return [self._running[key] for key in self._into.get(store_id, ())]

    def out_of(self, store_id: str) -> list[Transfer]:
        """Transfers that are planned to come from the store, or from REMOTE."""
        return [self._running[key] for key in self._out_of.get(store_id, ())]

    def touching(self, store_ids: Iterable[str]) -> list[Transfer]:
        """Transfers of our own plans on the links of these stores, oldest first."""
        stores = dict.fromkeys(store_ids)
        transfers = [transfer for store_id in stores for transfer in (*self.into(store_id), *self.out_of(store_id))]
        planned = {transfer.key: transfer for transfer in transfers if transfer.sources}
        return sorted(planned.values(), key=lambda transfer: transfer.rank)

    def of_pack(self, pack_id: str) -> list[Transfer]:
        return [self._running[key] for key in self._of_pack.get(pack_id, ())]

    def with_rates(self) -> list[Transfer]:
        """Transfers of our own plans, which have rates; other transfers show only in the links' counters."""
        return [transfer for transfer in self._running.values() if transfer.sources]

    def receiving(self, pack_id: str, stores: Iterable[StoreStatus]) -> list[str]:
        """Stores that are receiving the pack, by transfers and by reports, oldest first.

        In one plan every target comes after its sources. Transfers that have not begun and that no plan has come last.
        """
        ranks = {transfer.target: transfer.rank for transfer in self.of_pack(pack_id)}
        reported = {store.store_id for store in stores if pack_id in store.copies and store.copies[pack_id].receiving}
        return [*sorted(ranks, key=ranks.__getitem__), *sorted(reported - ranks.keys())]

    def progress(self, pack_id: str, stores: Iterable[StoreStatus]) -> dict[str, ReceiveProgress]:
        """Progress of incoming copies: as reported, at the measured rate or otherwise the planned rate."""
        progress = {}
        for store in stores:
            copy = store.copies.get(pack_id)
            transfer = self._running.get((pack_id, store.store_id))
            if transfer is not None or (copy is not None and copy.receiving):
                planned = transfer.planned_bytes_per_s if transfer else 0.0
                measured = copy.bytes_per_s if copy else 0.0
                have = copy.num_chunks_verified / copy.num_chunks if copy and copy.num_chunks else 0.0
                progress[store.store_id] = ReceiveProgress(have, measured or planned or DEFAULT_BYTES_PER_S)
        return progress

    def shown(self, now: float) -> list[Transfer]:
        """Transfers under way and recently ended, the last of each pack and target, in the order planned."""
        ended = {transfer.key: transfer for transfer in self._ended if now - transfer.ended_at < ENDED_SHOWN_S}
        running = {key: transfer for key, transfer in self._running.items() if not transfer.missing}
        return sorted((ended | running).values(), key=lambda transfer: transfer.planned_at)

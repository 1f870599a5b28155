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

A transfer is slow while it gets less than half of its planned rate and of its sources' own rate. After ``SLOW_AFTER_S``
it is planned again. If the new sources are expected to bring enough more, it switches to them; either way it is left
alone for ``REPLAN_COOLDOWN_S``.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.reasons import NO_REASON, Reason
from torchrelay.scheduler.policy.relay.planning import DEFAULT_BYTES_PER_S, Node, ReceiveProgress, TransferEdge, plan
from torchrelay.scheduler.policy.types import REMOTE, CopyCause, PackCopy, SourceShare, StoreStatus

ENDED_SHOWN_S = 6.0  # how long an ended transfer is shown
START_TIMEOUT_S = 10.0  # a transfer that its store does not begin within this time has failed
SLOW_FACTOR = 2.0  # planned rate over measured rate
SLOW_AFTER_S = 1.0
REPLAN_COOLDOWN_S = 5.0
MIN_GAIN = 1.5  # the expected rate of new sources, as a multiple of the measured rate
_MAX_ENDED = 64

TransferKey = tuple[str, str]  # pack, target


class TransferEventKind(enum.Enum):
    """The events of a transfer; the values are the history's."""

    STARTED = "started"
    REPAIRED = "repaired"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Transfer:
    """A store's incoming copy of a pack, which ``Transfers`` alone changes. Times are the scheduler's; 0 means not
    yet.
    """

    pack_id: str
    target: str
    pack_bytes: int
    planned_at: float  # or first reported
    sources: Mapping[str, float] = field(default_factory=dict)  # their planned rates; empty: the plan is not known
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

    def is_young(self, now: float) -> bool:
        return now - (self.accepted_at or self.planned_at) <= START_TIMEOUT_S

    def is_slow(self, now: float) -> bool:
        """Whether it has been slow for ``SLOW_AFTER_S``, or is slow again or still after it was planned again."""
        has_lasted = now - self.slow_since >= SLOW_AFTER_S
        return self.slow_since > 0 and (self.replan_checked_at > 0 or has_lasted)

    def is_replan_due(self, now: float) -> bool:
        has_lasted = now - self.slow_since >= SLOW_AFTER_S
        return self.slow_since > 0 and has_lasted and now - self.replan_checked_at >= REPLAN_COOLDOWN_S

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
        """The mean rate of the whole run; 0 if it never ran."""
        took_s = self.running_s(self.ended_at)
        return self.num_bytes_received / took_s if took_s > 0 else 0.0


@dataclass(frozen=True)
class TransferEvent:
    """A step of a transfer."""

    kind: TransferEventKind
    transfer: Transfer
    before: PackCopy | None = None  # for REPAIRED: the copy as of the last event
    in_history: bool = True  # False if no bytes had to flow, or if its end is recorded already


def sources_joined(before: PackCopy | None, copy: PackCopy) -> tuple[str, ...]:
    """Sources followed now but not in ``before``. Without earlier shares the first source counts as the original."""
    known = {share.holder_id for share in before.shares if share.following} if before else set()
    following = [share.holder_id for share in copy.shares if share.following and share.holder_id not in known]
    return tuple(following if before and before.shares else following[1:])


def sources_dropped(before: PackCopy | None, copy: PackCopy) -> Mapping[str, str]:
    """Sources given up since ``before``, with the reason."""
    known = {share.holder_id: share.error for share in before.shares} if before else {}
    errors = {share.holder_id: share.error for share in copy.shares if share.error}
    return {source: error for source, error in errors.items() if known.get(source) != error}


class Transfers:
    """All transfers that have not ended, and the last that have. Owned by the state."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._running: dict[TransferKey, Transfer] = {}
        self._into: dict[str, dict[str, Transfer]] = {}  # the same by target and pack
        self._ended: deque[Transfer] = deque(maxlen=_MAX_ENDED)
        self._ranks = count(1)

    def _add(self, transfer: Transfer) -> None:
        self._running[transfer.key] = transfer
        self._into.setdefault(transfer.target, {})[transfer.pack_id] = transfer

    def _remove(self, transfer: Transfer) -> None:
        if self._running.pop(transfer.key, None) is not None:
            del self._into[transfer.target][transfer.pack_id]
            if not self._into[transfer.target]:
                del self._into[transfer.target]

    # Plans and commands

    def plan(
        self,
        pack_id: str,
        pack_bytes: int,
        edges: Iterable[TransferEdge],
        now: float,
        *,
        urgent: bool = True,
        reason: Reason = NO_REASON,
        cause: CopyCause | None = None,
    ) -> tuple[TransferEdge, ...]:
        """Counts planned edges as started. An edge on its way already keeps its sources and takes on the new demand.
        Returns the edges as they are now.
        """
        planned = []
        for edge in edges:
            key = pack_id, edge.target
            running = self._running.get(key)
            if edge.already_there and running is not None:
                running.urgent, running.cause = running.urgent or urgent, cause or running.cause
                edge = _with_running_sources(edge, running)
            elif not edge.already_there or cause is not None:
                store = self._membership.stores.get(edge.target)
                earlier = store.copies.get(pack_id) if store is not None else None
                transfer = Transfer(*key, pack_bytes, now, {} if edge.already_there else edge.rates, edge.bytes_per_s)
                transfer.urgent, transfer.reason, transfer.cause = urgent, reason, cause
                transfer.rank, transfer.stale_begin_us = next(self._ranks), earlier.relay_begin_us if earlier else None
                self._add(transfer)
            planned.append(edge)
        return tuple(planned)

    def hasten(self, pack_id: str, targets: Iterable[str]) -> list[Transfer]:
        """Makes all transfers upstream of these targets urgent, and returns those that were not."""
        hastened = []
        running = (self._running.get((pack_id, target)) for target in targets)
        upstream = [source for transfer in running if transfer is not None for source in transfer.sources]
        while upstream:
            transfer = self._running.get((pack_id, upstream.pop()))
            if transfer is not None and not transfer.urgent:
                transfer.urgent = True
                hastened.append(transfer)
                upstream += transfer.sources
        return hastened

    def accepted(self, key: TransferKey, now: float) -> None:
        """Records that the store accepted the replicator's order."""
        if transfer := self._running.get(key):
            transfer.accepted_at = now

    def refused(self, key: TransferKey, error: str, now: float) -> list[TransferEvent]:
        """Ends a transfer whose store could not be reached or refused the relay; no effect on one that has begun."""
        transfer = self._running.get(key)
        return [self._end(transfer, now, error)] if transfer is not None and not transfer.begun_at else []

    # Reports

    def observe(self, store: StoreStatus, before: StoreStatus | None, now: float) -> list[TransferEvent]:
        """Applies a report. ``before``: the store's previous one; without it, what runs was running already."""
        events: list[TransferEvent] = []
        for copy in store.copies.values():
            key = (copy.pack_id, store.store_id)
            if key not in self._running and (unplanned := self._unplanned(copy, store.store_id, before, now)):
                self._add(unplanned)
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
        if not transfer.sources or not transfer.is_young(now):
            return self._end(transfer, now, "it was dropped")
        return self._end_run(transfer, now, "it was dropped", missing=True, stale_begin_us=None)

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
                    self._remove(transfer)
                    yield TransferEvent(TransferEventKind.FINISHED, transfer, in_history=False)
                elif copy.error and copy.relay_begin_us != transfer.stale_begin_us:
                    transfer.copy = copy
                    yield self._end(transfer, now, copy.error)
                return
            transfer.begun_at, transfer.missing, transfer.copy = now, False, copy
            transfer.pack_bytes = copy.pack_bytes or transfer.pack_bytes
            yield TransferEvent(TransferEventKind.STARTED, transfer)
        elif copy.relay_begin_us == transfer.stale_begin_us and transfer.is_young(now):
            return  # an older report, from before the begin
        elif transfer.copy is not None and copy.relay_begin_us != transfer.copy.relay_begin_us and not copy.error:
            if copy.relay_begin_us:  # one run ended and another began between two reports
                yield self._end_run(transfer, now, "it was begun anew")
                yield from self._advance(self._running[transfer.key], copy, now)
            elif copy.complete:  # a restarted store found it whole in its arena
                transfer.copy = copy
                yield self._end(transfer, now, "")
            return
        before, transfer.copy = transfer.repair_base, copy
        is_over = copy.complete or bool(copy.error)
        if copy.num_repairs <= (before.num_repairs if before else 0):
            transfer.repair_base = copy
        elif is_over or _is_repair_complete(before, copy):
            transfer.repair_base = copy
            yield TransferEvent(TransferEventKind.REPAIRED, transfer, before)
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

    def _end_run(self, transfer: Transfer, now: float, error: str, **waiting: Any) -> TransferEvent:
        """Ends a run whose plan and order stand for the next run. ``waiting``: changes until it begins."""
        next_run = replace(transfer, begun_at=0.0, copy=None, repair_base=None, **waiting)
        transfer.cause = None
        event = self._end(transfer, now, error)
        self._add(next_run)
        return event

    def _end(self, transfer: Transfer, now: float, error: str) -> TransferEvent:
        self._remove(transfer)
        transfer.ended_at, transfer.error = now, error
        if not transfer.missing:
            self._ended.append(transfer)
        kind = TransferEventKind.FAILED if error else TransferEventKind.FINISHED
        return TransferEvent(kind, transfer, in_history=not transfer.missing)

    # Slow transfers

    def note_rate(self, transfer: Transfer, bytes_per_s: float, now: float) -> None:
        """Marks a transfer as slow or not by the measured rate from all its sources. A transfer whose sources are slow
        themselves does not count as slow, because their sources are to be changed.
        """
        arriving = [self._progress(transfer.pack_id, source) for source in transfer.sources]
        at_sources = max((copy.bytes_per_s if copy else math.inf for copy in arriving), default=math.inf)
        is_slow = bytes_per_s * SLOW_FACTOR < min(transfer.planned_bytes_per_s, at_sources)
        transfer.slow_since = (transfer.slow_since or now) if is_slow else 0.0

    def better_edge(self, transfer: Transfer, copy: PackCopy, nodes: Mapping[str, Node]) -> TransferEdge | None:
        """The edge that a slow transfer should have now; None if nothing better is known. Stores after the target
        follow it and are no sources. ``nodes``: without the bandwidth that this transfer takes.
        """
        pack_id, target = transfer.key
        arriving = self.arriving(pack_id)
        whole = [store_id for store_id in self._membership.whole_holders(pack_id) if store_id != target]
        before = list(takewhile(lambda store_id: store_id != target, arriving))
        if not whole and not before:
            return None
        (edge,) = plan(whole, before, [target], nodes=nodes, arriving=arriving, num_bytes=copy.missing_bytes)
        is_same = set(edge.striped) == set(transfer.sources)
        return None if is_same or edge.bytes_per_s < MIN_GAIN * copy.bytes_per_s else edge

    def replan(self, transfer: Transfer, edge: TransferEdge | None, now: float) -> None:
        """Gives a slow transfer the sources of the edge, unless none better is known; for a while it is left alone."""
        transfer.slow_since, transfer.replan_checked_at = 0.0, now
        if edge is not None:
            transfer.sources, transfer.planned_bytes_per_s = edge.rates, edge.bytes_per_s
            transfer.num_replans += 1

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
        return list(self._into.get(store_id, {}).values())

    def touching(self, store_ids: Iterable[str]) -> list[Transfer]:
        """Transfers of our own plans on the links of these stores, and on the remote store's, oldest first. Other
        transfers have no planned rates and show only in the links' counters.
        """
        stores = {*store_ids, REMOTE}
        planned = (transfer for transfer in self._running.values() if transfer.sources)
        touching = (transfer for transfer in planned if not stores.isdisjoint((transfer.target, *transfer.sources)))
        return sorted(touching, key=lambda transfer: transfer.rank)

    def arriving(self, pack_id: str) -> dict[str, ReceiveProgress]:
        """Progress of the pack's incoming copies by store, oldest first: in one plan every target comes after its
        sources. Copies that have not begun and that no plan has come last.
        """

        def age(store_id: str) -> tuple[float, str]:
            transfer = self._running.get((pack_id, store_id))
            return transfer.rank if transfer is not None else math.inf, store_id

        holders = (store.store_id for store in self._membership.holders(pack_id))
        targets = (transfer.target for transfer in self._running.values() if transfer.pack_id == pack_id)
        progress = {store_id: self._progress(pack_id, store_id) for store_id in sorted({*holders, *targets}, key=age)}
        return {store_id: copy for store_id, copy in progress.items() if copy is not None}

    def _progress(self, pack_id: str, store_id: str) -> ReceiveProgress | None:
        """Progress of an incoming copy as reported, at the measured rate or otherwise the planned rate; None if nothing
        arrives.
        """
        store, transfer = self._membership.stores.get(store_id), self._running.get((pack_id, store_id))
        copy = store.copies.get(pack_id) if store is not None else None
        arrives = transfer is not None or (copy is not None and not copy.error)
        if store is None or not arrives or (copy is not None and copy.complete):
            return None
        planned, measured = transfer.planned_bytes_per_s if transfer else 0.0, copy.bytes_per_s if copy else 0.0
        have = copy.num_chunks_verified / copy.num_chunks if copy and copy.num_chunks else 0.0
        return ReceiveProgress(have, measured or planned or DEFAULT_BYTES_PER_S)

    def shown(self, now: float) -> list[Transfer]:
        """Transfers under way and recently ended, the last of each pack and target, in the order planned."""
        ended = {transfer.key: transfer for transfer in self._ended if now - transfer.ended_at < ENDED_SHOWN_S}
        running = {key: transfer for key, transfer in self._running.items() if not transfer.missing}
        return sorted((ended | running).values(), key=lambda transfer: transfer.planned_at)


def _with_running_sources(edge: TransferEdge, running: Transfer) -> TransferEdge:
    """The edge with the sources of a running transfer first, for a store that is told again of a copy on its way."""
    if not running.sources:
        return edge
    peers = [source for source in running.sources if source != REMOTE]
    sources, num_striped = tuple(dict.fromkeys((*peers, *edge.sources))), max(len(peers), 1)
    return replace(edge, sources=sources, num_striped=num_striped, shares=(1 / num_striped,) * num_striped)


def _is_repair_complete(before: PackCopy | None, copy: PackCopy) -> bool:
    """Whether a repair can be reported in full; otherwise the next source is still being opened."""
    follows = any(share.following for share in copy.shares)
    return bool(sources_joined(before, copy) or (sources_dropped(before, copy) and follows))

"""Each relay from its plan to its end, as plans and the stores' reports tell of it: for people to see. Pure.

    planned --first chunk asked for--> running --last chunk verified--> finished
       `--refused, or never begun--> failed <--error, dropped, store gone--'

A relay is known by its pack and its target. When it began, by the target's clock, tells a run from an earlier one,
whose record stands in the reports until the next has begun. What somebody else ordered is known from the reports alone.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.policy.core import PackCopy, StoreStatus
from torchrelay.scheduler.policy.reasons import Reason

ENDED_SHOWN_S = 6.0  # how long one that has ended is shown
START_TIMEOUT_S = 10.0  # one whose store does not begin it within this time has failed
_MAX_ENDED = 64

Key = tuple[str, str]  # pack, target


class TransferEventKind(enum.Enum):
    """What the reports tell of a relay; the values are the history's, which also knows slow ones."""

    BEGUN = "begun"
    REPAIRED = "repaired"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class TransferStatus:
    """One store's incoming copy. Times are the scheduler's, 0: not yet."""

    pack_id: str
    target: str
    pack_bytes: int
    planned_at: float
    feeds: tuple[tuple[str, float], ...] = ()  # sources with their rates, as planned; empty: the plan is not known
    planned_bytes_per_s: float = 0.0  # 0: nothing was predicted
    urgent: bool = True
    reason: Reason = field(default_factory=Reason)
    stale_begin_us: int = 0  # of an earlier run
    num_replans: int = 0
    begun_at: float = 0.0
    copy: PackCopy | None = None  # as last reported
    told: PackCopy | None = None  # as it was when repairs were last told
    ended_at: float = 0.0
    error: str = ""

    @property
    def key(self) -> Key:
        return self.pack_id, self.target

    def running_s(self, now: float) -> float:
        """Since it began; of one that has finished what its store measured."""
        if self.copy is not None and self.copy.relay_end_us:
            return (self.copy.relay_end_us - self.copy.relay_begin_us) / 1e6
        return (self.ended_at or now) - self.begun_at if self.begun_at else 0.0

    @property
    def num_bytes_received(self) -> int:
        """By this run: what an earlier one brought is not fetched again."""
        if self.copy is None:
            return 0
        return sum(share.num_bytes for share in self.copy.shares) or (self.pack_bytes if self.copy.complete else 0)


@dataclass(frozen=True)
class TransferEvent:
    """A turn of a relay; ``before``: the copy as it was when this was last told."""

    kind: TransferEventKind
    transfer: TransferStatus
    before: PackCopy | None = None


class Transfers:
    """Owned by the state."""

    def __init__(self) -> None:
        self._running: dict[Key, TransferStatus] = {}
        self._ended: deque[TransferStatus] = deque(maxlen=_MAX_ENDED)

    def drawn(self, transfer: TransferStatus) -> None:
        """It was planned."""
        self._running[transfer.key] = transfer

    def mark_urgent(self, key: Key) -> None:
        """Somebody waits for it by now."""
        if transfer := self._running.get(key):
            self._running[key] = replace(transfer, urgent=True)

    def redrawn(self, key: Key, feeds: tuple[tuple[str, float], ...], bytes_per_s: float) -> None:
        """It goes on with other sources."""
        if transfer := self._running.get(key):
            changed = replace(transfer, feeds=feeds, planned_bytes_per_s=bytes_per_s)
            self._running[key] = replace(changed, num_replans=transfer.num_replans + 1)

    @property
    def num_running(self) -> int:
        """Planned and running."""
        return len(self._running)

    def get(self, key: Key) -> TransferStatus | None:
        return self._running.get(key)

    def shown(self, now: float) -> list[TransferStatus]:
        """Those under way and those that ended of late, of each pack and target the last, in the order drawn."""
        ended = {transfer.key: transfer for transfer in self._ended if now - transfer.ended_at < ENDED_SHOWN_S}
        return sorted((ended | self._running).values(), key=lambda transfer: transfer.planned_at)

    def observe(self, store: StoreStatus, before: StoreStatus | None, now: float) -> list[TransferEvent]:
        """What a report tells. ``before``: the store's last one; without it, what runs has been running."""
        told: list[TransferEvent] = []
        for copy in store.copies.values():
            key = (copy.pack_id, store.store_id)
            if key not in self._running and (found := _unplanned_transfer(copy, store.store_id, before, now)):
                self._running[key] = found
            if transfer := self._running.get(key):
                told += self._advance(transfer, copy, now)
        for transfer in self._into(store.store_id):
            if transfer.pack_id not in store.copies and transfer.begun_at:
                told.append(self._end(transfer, now, "it was dropped"))
            elif not transfer.begun_at and now - transfer.planned_at > START_TIMEOUT_S:
                told.append(self._end(transfer, now, "its store has not begun it"))
        return told

    def refused(self, key: Key, cause: str, now: float) -> list[TransferEvent]:
        """The store could not be told of it, or did not take it; one that runs already goes on."""
        transfer = self._running.get(key)
        return [self._end(transfer, now, cause)] if transfer is not None and not transfer.begun_at else []

    def lost(self, store_id: str, cause: str, now: float) -> list[TransferEvent]:
        """The target is gone, or silent."""
        return [self._end(transfer, now, cause) for transfer in self._into(store_id)]

    def _into(self, store_id: str) -> list[TransferStatus]:
        return [transfer for transfer in self._running.values() if transfer.target == store_id]

    def _advance(self, transfer: TransferStatus, copy: PackCopy, now: float) -> Iterator[TransferEvent]:
        if not transfer.begun_at:
            if copy.relay_begin_us in (0, transfer.stale_begin_us):
                if copy.complete:  # it was there already: nothing flows
                    del self._running[transfer.key]
                return
            transfer = replace(transfer, begun_at=now, copy=copy, pack_bytes=copy.pack_bytes or transfer.pack_bytes)
            yield TransferEvent(TransferEventKind.BEGUN, transfer)
        elif transfer.copy is not None and copy.relay_begin_us != transfer.copy.relay_begin_us and not copy.error:
            if copy.relay_begin_us:  # between two reports one run ended and another began
                yield self._end(transfer, now, "it was begun anew")
                again = replace(transfer, begun_at=0.0, copy=None, told=None)
                self._running[transfer.key] = again
                yield from self._advance(again, copy, now)
            return
        before, transfer = transfer.told, replace(transfer, copy=copy)
        is_over = copy.complete or bool(copy.error)
        if copy.num_repairs > (before.num_repairs if before else 0):
            if is_over or _is_repaired(before, copy):
                transfer = replace(transfer, told=copy)
                yield TransferEvent(TransferEventKind.REPAIRED, transfer, before)
        else:
            transfer = replace(transfer, told=copy)
        self._running[transfer.key] = transfer
        if is_over:
            yield self._end(transfer, now, copy.error)

    def _end(self, transfer: TransferStatus, now: float, error: str) -> TransferEvent:
        self._running.pop(transfer.key, None)
        ended = replace(transfer, ended_at=now, error=error)
        self._ended.append(ended)
        return TransferEvent(TransferEventKind.FAILED if error else TransferEventKind.FINISHED, ended)


def _unplanned_transfer(copy: PackCopy, target: str, before: StoreStatus | None, now: float) -> TransferStatus | None:
    """A relay that no plan of ours began, if the copy shows one: new since the last report, or still receiving."""
    found = TransferStatus(copy.pack_id, target, copy.pack_bytes, now)
    if before is None:
        return replace(found, begun_at=now, copy=copy, told=copy) if copy.receiving and copy.relay_begin_us else None
    known = before.copies.get(copy.pack_id)
    is_new = copy.relay_begin_us != (known.relay_begin_us if known else 0)
    return found if is_new and copy.relay_begin_us else None


def _is_repaired(before: PackCopy | None, copy: PackCopy) -> bool:
    """Whether a repair can be told of whole; else the next source is still being opened."""
    follows = any(share.following for share in copy.shares)
    return bool(sources_joined(before, copy) or (sources_dropped(before, copy) and follows))


def sources_joined(before: PackCopy | None, copy: PackCopy) -> tuple[str, ...]:
    """Sources that are followed now, and were not; of a run of which nothing was told yet those that came later."""
    known = {share.holder_id for share in before.shares if share.following} if before else set()
    following = [share.holder_id for share in copy.shares if share.following and share.holder_id not in known]
    return tuple(following if before and before.shares else following[1:])


def sources_dropped(before: PackCopy | None, copy: PackCopy) -> Mapping[str, str]:
    """Why, by source."""
    known = {share.holder_id: share.error for share in before.shares} if before else {}
    return {
        share.holder_id: share.error
        for share in copy.shares
        if share.error and known.get(share.holder_id, "") != share.error
    }

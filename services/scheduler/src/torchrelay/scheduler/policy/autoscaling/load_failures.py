"""Failed and stalled loads: when to give up a load, which workers to avoid, when to retry, and when to refuse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.estimates.latency import load_s
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.storage_tiers import Tier

LOAD_STALLED: Final = "load_stalled"  # the cause of a drain
_MAX_AVOID_S = 300.0
_FORGOTTEN_AFTER = 10  # longest back-offs after which a failure no longer counts
_UNANSWERED_S = 1.0  # a load whose call ended without an answer, if accepted, appears in a report within this time


class _Progress(NamedTuple):
    """State of a load; any change is progress."""

    is_accepted: bool = False
    num_phases: int = 0
    num_layers_ready: int = 0
    num_chunks_verified: int | None = None  # None: the store has not reported the copy


@dataclass(slots=True)
class LoadFailures:
    """Failed loads of a version since its last successful load."""

    num_tries: int = 0
    not_before: float = 0.0  # no load of the version is ordered before this time
    is_of_store: bool = False  # the last failure was the store's, not the model's or the worker's
    _counted_wake_at: float = -1.0
    _last_cause: str = ""  # of the last failure, if that was the last try

    def add(self, cause: str, wake_at: float, now: float, config: PolicyConfig, *, is_of_store: bool = False) -> bool:
        """Records a failed load, decided at ``wake_at``; loads decided together count as one try.

        True if that was the last try, so that waiting requests are refused. For later requests the tries start over
        after the longest back-off.
        """
        longest_s = config.load_backoff_max_s
        self.is_of_store = is_of_store
        if wake_at <= self._counted_wake_at:
            return False
        if now > self.not_before + _FORGOTTEN_AFTER * longest_s:
            self.num_tries = 0
        self._counted_wake_at = wake_at
        backoff_s, num_tries = config.load_backoff_s * 2**self.num_tries, self.num_tries + 1
        is_last = num_tries >= config.load_tries
        self.num_tries, self._last_cause = (0, cause) if is_last else (num_tries, "")
        self.not_before = now + (longest_s if is_last else min(backoff_s, longest_s))
        return is_last

    def given_up_for(self, now: float) -> str:
        """Why the version is not loaded for a while after its last try; empty if it may be loaded."""
        return self._last_cause if now < self.not_before else ""


class AvoidedWorkers:
    """Workers where loads of any model failed and none has succeeded since, or whose store was lost: they are used only
    if there is no other.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._first_s = config.load_backoff_max_s
        self._failures: dict[str, int] = {}  # number by worker
        self._until: dict[str, float] = {}

    def load_failed(self, worker_id: str, now: float) -> None:
        """Avoids the worker, after each further failure for longer: otherwise a worker on which no load ever succeeds
        would get half of each model's pair.
        """
        number = self._failures.get(worker_id, 0)
        self._until[worker_id] = now + min(self._first_s * 2**number, _MAX_AVOID_S)
        self._failures[worker_id] = min(number + 1, 16)

    def store_lost(self, worker_ids: Iterable[str], now: float) -> None:
        """Avoids the workers of a host whose store was lost, for the shortest time: stores restart."""
        for worker_id in worker_ids:
            self._until[worker_id] = max(self._until.get(worker_id, 0.0), now + self._first_s)

    def succeeded(self, worker_id: str) -> None:
        self._failures.pop(worker_id, None)
        self._until.pop(worker_id, None)

    def at(self, now: float) -> frozenset[str]:
        """The workers to avoid; forgets failures of long ago."""
        for worker_id in [each for each, until in self._until.items() if until + _MAX_AVOID_S < now]:
            self.succeeded(worker_id)
        return frozenset(worker_id for worker_id, until in self._until.items() if until > now)


class LoadProgress:
    """The progress of all loads: a load without any is given up."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._reached: dict[str, tuple[_Progress, float]] = {}  # by instance, with the time

    def stalled(self, loading: Iterable[Instance], membership: Membership, now: float) -> list[tuple[Instance, Reason]]:
        """Loading instances to give up, with the reason for each: no bytes arrive any more, or the bytes that arrived
        are not loaded. A load that makes progress may take any time. ``loading``: all loading instances.
        """
        before, self._reached = self._reached, {}
        stalled = []
        for instance in loading:
            earlier, since = before.get(instance.instance_id, (_Progress(), now))
            reached = _reached(instance, membership, earlier)
            since = since if reached == earlier else now
            self._reached[instance.instance_id] = reached, since
            if why := self._why_stalled(instance, membership, now - since, now):
                stalled.append((instance, Reason(LOAD_STALLED, why)))
        return stalled

    def _why_stalled(self, instance: Instance, membership: Membership, stopped_s: float, now: float) -> str:
        store, limit_s = membership.store_of(instance.host_id), self._config.load_stall_s
        if store is None:
            is_over = stopped_s > self._config.load_orphan_s
            return f"the param-store of host {instance.host_id} does not answer" if is_over else ""
        if not instance.accepted:  # the Load call has its own deadline
            is_over = instance.unanswered_at > 0 and now - instance.unanswered_at > _UNANSWERED_S
            return "the worker did not answer, and does not say that it loads" if is_over else ""
        copy, why = store.copies.get(instance.pack_id), "nothing of its pack arrived"
        if copy is not None and copy.complete:
            if instance.loaded_share >= 1:
                return ""  # its engine starts, and the worker reports whether that advances
            limit_s = max(limit_s, 2 * load_s(copy.pack_bytes, Tier.HOST, self._config))
            why = "its host has the pack, and no layer of it was loaded"
        return f"{why} for {limit_s:g} s" if stopped_s > limit_s else ""


def _reached(instance: Instance, membership: Membership, earlier: _Progress) -> _Progress:
    worker, store = membership.workers.get(instance.worker_id), membership.store_of(instance.host_id)
    num_phases = len(worker.slot.load_phases) if worker is not None and instance.confirmed else 0
    copy = store.copies.get(instance.pack_id) if store is not None else None
    num_chunks = copy.num_chunks_verified if copy is not None else earlier.num_chunks_verified
    return _Progress(instance.accepted, num_phases, instance.num_layers_ready, num_chunks)

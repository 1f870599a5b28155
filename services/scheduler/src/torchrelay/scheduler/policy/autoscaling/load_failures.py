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
_UNANSWERED_S = 1.0  # a load whose call ended without an answer, if accepted, appears in a report within this time


@dataclass
class _Failures:
    """Failed loads of a version."""

    num_tries: int = 0
    counted_wake_at: float = -1.0
    not_before: float = 0.0
    given_up_for: str = ""  # cause of the last failure, if that was the last try
    is_of_store: bool = False  # the last failure was the store's, not the model's or the worker's


@dataclass
class _AvoidedWorker:
    """A worker where loads of any model failed and none has succeeded since, or whose store was lost."""

    num_failures: int = 0
    until: float = 0.0


class _Progress(NamedTuple):
    """State of a load; any change is progress."""

    is_accepted: bool = False
    num_phases: int = 0
    num_layers_ready: int = 0
    num_chunks_verified: int | None = None  # None: the store has not reported the copy


_NO_FAILURES = _Failures()


class LoadFailures:
    """Failed loads by version and by worker, which a successful load clears; and the progress of loads."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._of: dict[str, _Failures] = {}
        self._avoided: dict[str, _AvoidedWorker] = {}
        self._reached: dict[str, tuple[_Progress, float]] = {}  # by instance, with the time

    def add(
        self, version_id: str, worker_id: str, cause: str, wake_at: float, now: float, *, is_of_store: bool = False
    ) -> bool:
        """Records a failed load, decided at ``wake_at``; loads decided together count as one try.

        True if that was the last try, so that waiting requests are refused. For later requests the tries start over
        after the longest back-off.
        """
        failures, longest_s = self._of.setdefault(version_id, _Failures()), self._config.load_backoff_max_s
        failures.is_of_store = is_of_store
        if not is_of_store:
            avoided = self._avoided.setdefault(worker_id, _AvoidedWorker())
            avoided.until = now + min(longest_s * 2**avoided.num_failures, _MAX_AVOID_S)
            avoided.num_failures = min(avoided.num_failures + 1, 16)
        if wake_at <= failures.counted_wake_at:
            return False
        failures.counted_wake_at = wake_at
        backoff_s, num_tries = self._config.load_backoff_s * 2**failures.num_tries, failures.num_tries + 1
        is_last = num_tries >= self._config.load_tries
        failures.num_tries, failures.given_up_for = (0, cause) if is_last else (num_tries, "")
        failures.not_before = now + (longest_s if is_last else min(backoff_s, longest_s))
        return is_last

    def store_lost(self, worker_ids: Iterable[str], now: float) -> None:
        """Avoids the workers of a host whose store was lost, for the longest back-off and no longer: stores restart."""
        for worker_id in worker_ids:
            avoided = self._avoided.setdefault(worker_id, _AvoidedWorker())
            avoided.until = max(avoided.until, now + self._config.load_backoff_max_s)

    def succeeded(self, version_id: str, worker_id: str) -> None:
        """Clears the failures of the version and the worker after a successful load."""
        self._of.pop(version_id, None)
        self._avoided.pop(worker_id, None)

    def prune(self, now: float) -> None:
        """Drops records too old to matter, which bounds their number."""
        horizon_s = 10 * self._config.load_backoff_max_s
        self._of = {key: each for key, each in self._of.items() if each.not_before + horizon_s >= now}
        self._avoided = {key: each for key, each in self._avoided.items() if each.until + _MAX_AVOID_S >= now}

    def given_up_for(self, version_id: str, now: float) -> str:
        """Why the version is not loaded for a while after its last try; empty if it may be loaded."""
        failures = self._of.get(version_id, _NO_FAILURES)
        return failures.given_up_for if now < failures.not_before else ""

    def is_of_store(self, version_id: str) -> bool:
        """Whether the last load failed because its store could not be reached or refused it."""
        return self._of.get(version_id, _NO_FAILURES).is_of_store

    def not_before(self, version_id: str) -> float:
        """The time before which no load of the version is ordered."""
        return self._of.get(version_id, _NO_FAILURES).not_before

    def avoid(self, now: float) -> frozenset[str]:
        """Workers where loads failed or whose store was lost, which are used only if there is no other.

        Workers with more failed loads are avoided for longer: otherwise a worker on which no load ever succeeds would
        get half of each model's pair.
        """
        return frozenset(worker_id for worker_id, avoided in self._avoided.items() if avoided.until > now)

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

"""Failed loads: which workers to avoid, when to retry, and when to give up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchrelay.scheduler.policy.config import PolicyConfig


@dataclass
class _FailureRecord:
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


_MAX_AVOID_S = 300.0


class LoadFailures:
    """Failed loads by version and by worker; a successful load clears them."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._of: dict[str, _FailureRecord] = {}
        self._avoided: dict[str, _AvoidedWorker] = {}

    def add(
        self, version_id: str, worker_id: str, cause: str, wake_at: float, now: float, *, is_of_store: bool = False
    ) -> bool:
        """Records a failed load, decided at ``wake_at``; loads decided together count as one try.

        True if that was the last try, so that waiting requests are refused. For later requests the tries start over
        after the longest back-off.
        """
        record = self._of.setdefault(version_id, _FailureRecord())
        record.is_of_store = is_of_store
        if not is_of_store:
            avoided = self._avoided.setdefault(worker_id, _AvoidedWorker())
            avoided.until = now + min(self._config.load_backoff_max_s * 2**avoided.num_failures, _MAX_AVOID_S)
            avoided.num_failures = min(avoided.num_failures + 1, 16)
        if wake_at <= record.counted_wake_at:
            return False
        record.counted_wake_at = wake_at
        record.num_tries += 1
        if record.num_tries >= self._config.load_tries:
            record.num_tries, record.given_up_for = 0, cause
            record.not_before = now + self._config.load_backoff_max_s
            return True
        record.given_up_for = ""
        backoff_s = self._config.load_backoff_s * 2 ** (record.num_tries - 1)
        record.not_before = now + min(backoff_s, self._config.load_backoff_max_s)
        return False

    def store_lost(self, worker_ids: Iterable[str], now: float) -> None:
        """Avoids the workers of a host whose store was lost, for the longest back-off and no longer: stores restart."""
        for worker_id in worker_ids:
            avoided = self._avoided.setdefault(worker_id, _AvoidedWorker())
            avoided.until = max(avoided.until, now + self._config.load_backoff_max_s)

    def given_up_for(self, version_id: str, now: float) -> str:
        """Why the version is not loaded for a while after its last try; empty if it may be loaded."""
        record = self._of.get(version_id)
        return record.given_up_for if record is not None and now < record.not_before else ""

    def is_of_store(self, version_id: str) -> bool:
        """Whether the last load failed because its store could not be reached or refused it."""
        record = self._of.get(version_id)
        return record is not None and record.is_of_store

    def succeeded(self, version_id: str, worker_id: str) -> None:
        """Clears the failures of the version and the worker after a successful load."""
        self._of.pop(version_id, None)
        self._avoided.pop(worker_id, None)

    def prune(self, now: float) -> None:
        """Drops records too old to matter, which bounds their number."""
        horizon_s = 10 * self._config.load_backoff_max_s
        for version_id in [key for key, record in self._of.items() if record.not_before + horizon_s < now]:
            del self._of[version_id]
        for worker_id in [key for key, avoided in self._avoided.items() if avoided.until + _MAX_AVOID_S < now]:
            del self._avoided[worker_id]

    def not_before(self, version_id: str) -> float:
        """The time before which no load of the version is ordered."""
        record = self._of.get(version_id)
        return record.not_before if record else 0.0

    def avoid(self, now: float) -> frozenset[str]:
        """Workers where loads failed or whose store was lost, which are used only if there is no other.

        Workers with more failed loads are avoided for longer: otherwise a worker on which no load ever succeeds would
        get half of each model's pair.
        """
        return frozenset(worker_id for worker_id, avoided in self._avoided.items() if avoided.until > now)

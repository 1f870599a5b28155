"""Failed loads: where not to try again at once, when to try again, and when to stop trying."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.scheduler.policy.config import PolicyConfig


@dataclass
class _FailureRecord:
    num_tries: int = 0
    counted_wake_at: float = -1.0
    cause: str = ""
    not_before: float = 0.0
    avoid: dict[str, float] = field(default_factory=dict)  # worker id -> until


class LoadFailures:
    """Failed loads by version. A success forgets them."""

    def __init__(self, config: PolicyConfig) -> None:
        self._rules = config
        self._of: dict[str, _FailureRecord] = {}

    def add(self, version_id: str, worker_id: str, cause: str, wake_at: float, now: float) -> bool:
        """Notes one failed load, decided at ``wake_at``; those decided together count as one try.

        True when the version has had all its tries: its waiting requests are to be told. Tries then start anew for
        later requests, after the longest back-off.
        """
        record = self._of.setdefault(version_id, _FailureRecord())
        record.cause = cause
        record.avoid[worker_id] = now + self._rules.load_backoff_max_s
        if wake_at <= record.counted_wake_at:
            return False
        record.counted_wake_at = wake_at
        record.num_tries += 1
        if record.num_tries >= self._rules.load_tries:
            record.num_tries = 0
            record.not_before = now + self._rules.load_backoff_max_s
            return True
        backoff_s = self._rules.load_backoff_s * 2 ** (record.num_tries - 1)
        record.not_before = now + min(backoff_s, self._rules.load_backoff_max_s)
        return False

    def forget(self, version_id: str) -> None:
        self._of.pop(version_id, None)

    def prune(self, now: float) -> None:
        """Drops records old enough to mean nothing; bounds the memory of failures."""
        horizon_s = 10 * self._rules.load_backoff_max_s
        for version_id in [key for key, record in self._of.items() if record.not_before + horizon_s < now]:
            del self._of[version_id]

    def cause(self, version_id: str) -> str:
        record = self._of.get(version_id)
        return record.cause if record else ""

    def not_before(self, version_id: str) -> float:
        """No load of the version is ordered before this time."""
        record = self._of.get(version_id)
        return record.not_before if record else 0.0

    def avoid(self, version_id: str, now: float) -> frozenset[str]:
        """Workers where it failed lately: taken only when there is no other."""
        record = self._of.get(version_id)
        return frozenset(worker for worker, until in record.avoid.items() if until > now) if record else frozenset()

"""Failed loads: which workers to avoid, when to retry, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.scheduler.policy.config import PolicyConfig


@dataclass
class _FailureRecord:
    num_tries: int = 0
    counted_wake_at: float = -1.0
    not_before: float = 0.0
    avoid: dict[str, float] = field(default_factory=dict)  # worker id -> until


class LoadFailures:
    """Failed loads by version; a successful load clears them."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._of: dict[str, _FailureRecord] = {}

    def add(self, version_id: str, worker_id: str, wake_at: float, now: float) -> bool:
        """Records a failed load, decided at ``wake_at``; loads decided together count as one try.

        True if that was the last try: waiting requests are refused. For later requests the tries start over, after the
        longest back-off.
        """
        record = self._of.setdefault(version_id, _FailureRecord())
        record.avoid[worker_id] = now + self._config.load_backoff_max_s
        if wake_at <= record.counted_wake_at:
            return False
        record.counted_wake_at = wake_at
        record.num_tries += 1
        if record.num_tries >= self._config.load_tries:
            record.num_tries = 0
            record.not_before = now + self._config.load_backoff_max_s
            return True
        backoff_s = self._config.load_backoff_s * 2 ** (record.num_tries - 1)
        record.not_before = now + min(backoff_s, self._config.load_backoff_max_s)
        return False

    def forget(self, version_id: str) -> None:
        self._of.pop(version_id, None)

    def prune(self, now: float) -> None:
        """Drops records too old to matter, which bounds their number."""
        horizon_s = 10 * self._config.load_backoff_max_s
        for version_id in [key for key, record in self._of.items() if record.not_before + horizon_s < now]:
            del self._of[version_id]

    def not_before(self, version_id: str) -> float:
        """The time before which no load of the version is ordered."""
        record = self._of.get(version_id)
        return record.not_before if record else 0.0

    def avoid(self, version_id: str, now: float) -> frozenset[str]:
        """Workers where it failed recently: used only if there is no other."""
        record = self._of.get(version_id)
        return frozenset(worker for worker, until in record.avoid.items() if until > now) if record else frozenset()

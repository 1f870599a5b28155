"""Open attempts, and the KV bytes reserved for them on decode instances.

A worker's own report of free KV lags behind placements by a tenth of a second. Placements are checked against these
reservations instead, so no instance is promised more KV than its worker's pool holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchrelay.scheduler.policy.core import Admission, AttemptKey, Placement
from torchrelay.scheduler.policy.prediction import Prediction


@dataclass(frozen=True)
class OpenAttempt:
    """An attempt between its placement and its release."""

    admission: Admission
    placement: Placement
    placed_at: float
    kv_bytes: int

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """One where both ends are the same instance."""
        return tuple(dict.fromkeys((self.placement.prefill.instance_id, self.placement.decode.instance_id)))


class KvReservations:
    """Open attempts by key and by instance."""

    def __init__(self) -> None:
        self._open: dict[AttemptKey, OpenAttempt] = {}
        # By either end; dicts for their order: predictions are summed in it, and a float sum depends on it.
        self._at: defaultdict[str, dict[AttemptKey, None]] = defaultdict(dict)
        self._reserved: defaultdict[str, int] = defaultdict(int)
        self._num_decoding: defaultdict[str, int] = defaultdict(int)
        self._num_choices: defaultdict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, key: AttemptKey) -> OpenAttempt | None:
        return self._open.get(key)

    def attempts(self) -> tuple[OpenAttempt, ...]:
        return tuple(self._open.values())

    def open(self, attempt: OpenAttempt) -> None:
        key = attempt.admission.key
        assert key not in self._open
        self._open[key] = attempt
        for instance_id in attempt.instance_ids:
            self._at[instance_id][key] = None
        decode = attempt.placement.decode.instance_id
        self._reserved[decode] += attempt.kv_bytes
        self._num_decoding[decode] += 1
        self._num_choices[decode] += attempt.admission.num_choices

    def close(self, key: AttemptKey) -> OpenAttempt | None:
        attempt = self._open.pop(key, None)
        if attempt is None:
            return None
        for instance_id in attempt.instance_ids:
            del self._at[instance_id][key]
            if not self._at[instance_id]:
                del self._at[instance_id]
        decode = attempt.placement.decode.instance_id
        self._reserved[decode] -= attempt.kv_bytes
        self._num_decoding[decode] -= 1
        self._num_choices[decode] -= attempt.admission.num_choices
        if not self._num_decoding[decode]:
            del self._num_decoding[decode], self._num_choices[decode], self._reserved[decode]
        return attempt

    def reserved_bytes(self, instance_id: str) -> int:
        return self._reserved.get(instance_id, 0)

    def num_decoding(self, instance_id: str) -> int:
        """Attempts."""
        return self._num_decoding.get(instance_id, 0)

    def num_choices(self, instance_id: str) -> int:
        """Of the attempts that decode there: the most rows that a step of it has."""
        return self._num_choices.get(instance_id, 0)

    def num_open(self, instance_id: str) -> int:
        """Attempts that prefill or decode there."""
        return len(self._at.get(instance_id, ()))

    def attempts_at(self, instance_ids: Iterable[str]) -> tuple[OpenAttempt, ...]:
        keys = dict.fromkeys(key for instance_id in instance_ids for key in self._at.get(instance_id, ()))
        return tuple(self._open[key] for key in keys)

    def predicted_since(self, instance_id: str, since: float) -> list[Prediction]:
        """Of attempts placed for prefill after ``since``: the worker's report cannot include them yet."""
        return [
            attempt.placement.predicted
            for attempt in self.attempts_at((instance_id,))
            if attempt.placed_at > since and attempt.placement.prefill.instance_id == instance_id
        ]

    def check_integrity(self, pools: Mapping[str, int]) -> None:
        """Sums agree with the attempts; none of ``pools`` (KV bytes by instance) is exceeded."""
        reserved: defaultdict[str, int] = defaultdict(int)
        choices: defaultdict[str, int] = defaultdict(int)
        for attempt in self._open.values():
            reserved[attempt.placement.decode.instance_id] += attempt.kv_bytes
            choices[attempt.placement.decode.instance_id] += attempt.admission.num_choices
        assert (dict(reserved), dict(choices)) == (dict(self._reserved), dict(self._num_choices))
        assert sum(self._num_decoding.values()) == len(self._open)
        assert {key for keys in self._at.values() for key in keys} == set(self._open)
        for instance_id, pool in pools.items():
            assert reserved.get(instance_id, 0) <= pool, instance_id

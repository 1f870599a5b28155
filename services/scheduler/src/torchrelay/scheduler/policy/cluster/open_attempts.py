"""Open attempts, and the work that they have dispatched to instances: prompts to compute and KV bytes to hold.

Workers' reports of their queues and free KV lag behind placements. Placements are checked against the work recorded
here, so no instance has more KV reserved than its worker's pool holds, and none gets more prompts than it can begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from torchrelay.scheduler.policy.cluster.prefill_queue import PrefillQueue
from torchrelay.scheduler.policy.prediction import Prediction
from torchrelay.scheduler.policy.types import Admission, AttemptKey, Caps, Placement


@dataclass(eq=False, slots=True)
class OpenAttempt:
    """An attempt between its placement and its release."""

    admission: Admission
    placement: Placement
    placed_at: float
    kv_bytes: int
    is_computed: bool = False  # its first token has arrived, so the prefill instance has finished it
    num_attended: int = 0  # expected positions that a decode step for it attends to, all choices together
    is_recalled: bool = False  # its gateway was told to ask again if it has not begun
    returns_to: str = ""  # the instance for which it is recalled
    is_partly_computed: bool = False  # recalled from a loading instance, which computes prompts layer by layer
    computed_at: float = 0.0

    @property
    def may_be_recalled(self) -> bool:
        """Whether the attempt may be recalled: once per request."""
        return not (self.is_recalled or self.admission.was_recalled)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """Instances of the attempt; a single id if the same instance prefills and decodes."""
        prefill_id, decode_id = self.placement.prefill.instance_id, self.placement.decode.instance_id
        return (prefill_id,) if prefill_id == decode_id else (prefill_id, decode_id)


@dataclass(slots=True)
class ModelWork:
    """Work of one of the models that share an instance."""

    num_open: int = 0  # attempts that the instance prefills or decodes
    kv_bytes: int = 0

    def is_within(self, caps: Caps, kv_bytes: int, pool_bytes: int) -> bool:
        """Whether a further attempt with ``kv_bytes`` of the pool is within the limits of the model."""
        has_place = not caps.max_concurrency or self.num_open < caps.max_concurrency
        return has_place and caps.holds(self.kv_bytes + kv_bytes, pool_bytes)


NO_WORK: Final = ModelWork()


@dataclass(eq=False, slots=True)
class DispatchedWork:
    """Work that open attempts have dispatched to an instance."""

    queue: PrefillQueue = field(default_factory=PrefillQueue)
    prefills: dict[AttemptKey, OpenAttempt] = field(default_factory=dict)  # not computed yet
    decodes: dict[AttemptKey, OpenAttempt] = field(default_factory=dict)
    of_model: dict[str, ModelWork] = field(default_factory=dict)  # of those with open attempts
    kv_bytes: int = 0
    num_choices: int = 0  # choices that decode, which is the largest batch of a step
    num_attended: int = 0  # positions that such a step attends to
    num_answers: int = 0  # decoding attempts that have their first token
    is_present: bool = False  # the instance is known, so that this is kept without work

    def change(self, model: str, num_open: int, kv_bytes: int = 0) -> None:
        """Adds to the work of a model, or takes from it."""
        own = self.of_model.setdefault(model, ModelWork())
        own.num_open += num_open
        own.kv_bytes += kv_bytes
        if not own.num_open:
            del self.of_model[model]

    @property
    def num_open(self) -> int:
        """Number of attempts that the instance prefills or decodes."""
        if not self.prefills:
            return len(self.decodes)
        return len(self.decodes) + sum(key not in self.decodes for key in self.prefills)

    @property
    def has_answers(self) -> bool:
        """Whether the instance decodes answers that have their first token."""
        return self.num_answers > 0

    @property
    def is_idle(self) -> bool:
        return not self.prefills and not self.decodes


class OpenAttempts:
    """Open attempts by key, and what they have dispatched, by instance."""

    def __init__(self, on_change: Callable[[str], None] = lambda instance_id: None) -> None:
        """``on_change`` is called with each instance to which work was dispatched, or which work left."""
        self._on_change = on_change
        self._open: dict[AttemptKey, OpenAttempt] = {}
        self._dispatched: dict[str, DispatchedWork] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, key: AttemptKey) -> OpenAttempt | None:
        return self._open.get(key)

    def attempts(self) -> tuple[OpenAttempt, ...]:
        return tuple(self._open.values())

    def work_of(self, instance_id: str) -> DispatchedWork:
        """Work of an instance that has appeared, or to which work is dispatched."""
        work = self._dispatched.get(instance_id)
        if work is None:
            work = self._dispatched[instance_id] = DispatchedWork()
        return work

    def instance_gone(self, instance_id: str) -> None:
        """Forgets the instance once its last attempt is closed."""
        work = self._dispatched[instance_id]
        work.is_present = False
        self._drop_unused(instance_id, work)

    def _drop_unused(self, instance_id: str, work: DispatchedWork) -> None:
        if work.is_idle and not work.is_present:
            del self._dispatched[instance_id]

    def open(self, attempt: OpenAttempt, now: float) -> None:
        key, placement = attempt.admission.key, attempt.placement
        assert key not in self._open
        self._open[key] = attempt
        if not attempt.is_computed:
            prefill = self.work_of(placement.prefill.instance_id)
            prefill.prefills[key] = attempt
            prefill.queue.add(key, placement.predicted.prefill_s, now, placement.predicted.pause_s)
            if len(attempt.instance_ids) > 1:
                prefill.change(attempt.admission.model, 1)
        decode = self.work_of(placement.decode.instance_id)
        decode.decodes[key] = attempt
        decode.kv_bytes += attempt.kv_bytes
        decode.num_choices += attempt.admission.num_choices
        decode.num_attended += attempt.num_attended
        decode.num_answers += attempt.is_computed
        decode.change(attempt.admission.model, 1, attempt.kv_bytes)
        for instance_id in attempt.instance_ids:
            self._on_change(instance_id)

    def predict(self, attempt: OpenAttempt, prefill_s: float) -> None:
        """Sets the predicted time of a prompt that is not computed, which was dispatched without a prediction."""
        attempt.placement = structs.replace(attempt.placement, predicted=Prediction(prefill_s=prefill_s))
        instance_id = attempt.placement.prefill.instance_id
        self._dispatched[instance_id].queue.predict(attempt.admission.key, prefill_s)
        self._on_change(instance_id)

    def computed(self, key: AttemptKey, now: float) -> OpenAttempt | None:
        """Records that the first token has arrived. Returns the attempt, if this is the first report of it."""
        attempt = self._open.get(key)
        if attempt is None or attempt.is_computed:
            return None
        attempt.is_computed, attempt.computed_at = True, now
        self._dispatched[attempt.placement.decode.instance_id].num_answers += 1
        self._leave_prefill(attempt, now)
        self._on_change(attempt.placement.prefill.instance_id)
        return attempt

    def close(self, key: AttemptKey, now: float) -> OpenAttempt | None:
        attempt = self._open.pop(key, None)
        if attempt is None:
            return None
        self._leave_prefill(attempt, now)
        instance_id = attempt.placement.decode.instance_id
        decode = self._dispatched[instance_id]
        del decode.decodes[key]
        decode.kv_bytes -= attempt.kv_bytes
        decode.change(attempt.admission.model, -1, -attempt.kv_bytes)
        decode.num_choices -= attempt.admission.num_choices
        decode.num_attended -= attempt.num_attended
        decode.num_answers -= attempt.is_computed
        if not decode.has_answers:
            decode.queue.answers_left()
        self._drop_unused(instance_id, decode)
        for instance_id in attempt.instance_ids:
            self._on_change(instance_id)
        return attempt

    def resumed(self, instance_id: str, now: float) -> None:
        """Records that the instance is loaded and begins with the prompts dispatched to it."""
        if work := self._dispatched.get(instance_id):
            work.queue.resume(now)
            self._on_change(instance_id)

    def _leave_prefill(self, attempt: OpenAttempt, now: float) -> None:
        instance_id, key = attempt.placement.prefill.instance_id, attempt.admission.key
        work = self._dispatched.get(instance_id)
        if work is not None and work.prefills.pop(key, None) is not None:
            work.queue.leave(key, now)
            if len(attempt.instance_ids) > 1:
                work.change(attempt.admission.model, -1)
            self._drop_unused(instance_id, work)

    def attempts_at(self, instance_ids: Iterable[str]) -> tuple[OpenAttempt, ...]:
        """Attempts that the instances prefill or decode, each once."""
        attempts: dict[AttemptKey, OpenAttempt] = {}
        for instance_id in instance_ids:
            if work := self._dispatched.get(instance_id):
                attempts |= work.prefills | work.decodes
        return tuple(attempts.values())

    def check_integrity(self, pools: Mapping[str, int]) -> None:
        """Checks that sums agree with the attempts and that no pool (``pools``: KV bytes by instance) is exceeded."""
        kv_bytes: dict[str, int] = {}
        num_choices: dict[str, int] = {}
        num_answers: dict[str, int] = {}
        for attempt in self._open.values():
            decode = attempt.placement.decode.instance_id
            kv_bytes[decode] = kv_bytes.get(decode, 0) + attempt.kv_bytes
            num_choices[decode] = num_choices.get(decode, 0) + attempt.admission.num_choices
            num_answers[decode] = num_answers.get(decode, 0) + attempt.is_computed
        for instance_id, work in self._dispatched.items():
            assert work.is_present or not work.is_idle
            assert work.kv_bytes == kv_bytes.get(instance_id, 0)
            assert work.kv_bytes == sum(own.kv_bytes for own in work.of_model.values())
            assert work.num_open == sum(own.num_open for own in work.of_model.values())
            assert work.num_choices == num_choices.get(instance_id, 0)
            assert work.num_answers == num_answers.get(instance_id, 0)
            assert len(work.queue) == len(work.prefills)
        known = {key for work in self._dispatched.values() for key in (*work.prefills, *work.decodes)}
        assert known == set(self._open)
        for instance_id, pool in pools.items():
            assert kv_bytes.get(instance_id, 0) <= pool, instance_id

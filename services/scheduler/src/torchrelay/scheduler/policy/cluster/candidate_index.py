"""Index of many instances for placements, in orders that change with dispatched work and not with time."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice

from torchrelay.scheduler.policy.cluster.instance import Instance

LEAST_ENTRIES = 32  # fewer instances have no index
_NUM_LISTED = 16  # entries of each order

_Key = tuple[float, int, str]


class CandidateIndex:
    """The instances that can take a prompt soonest, that decode least, and that are loaded soonest."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._instances = {instance.instance_id: instance for instance in instances}
        self._changed = set(self._instances)
        self._prefills, self._decodes, self._loads = _Order(), _Order(), _Order()

    def change(self, instance: Instance) -> None:
        """Records that work was dispatched to the instance or left it, or that it will be loaded at another time."""
        if instance.instance_id in self._instances:
            self._changed.add(instance.instance_id)

    def of(self, instance_ids: Iterable[str]) -> list[Instance]:
        """Returns the instances among these that take requests of the version."""
        return [each for instance_id in instance_ids if (each := self._instances.get(instance_id)) is not None]

    def likeliest(self) -> list[Instance]:
        self._sort()
        orders = (self._prefills, self._decodes, self._loads)
        instance_ids = dict.fromkeys(instance_id for order in orders for instance_id in order.first(_NUM_LISTED))
        return [self._instances[instance_id] for instance_id in instance_ids]

    def is_full(self, now: float) -> bool:
        """Whether no instance can take a prompt if none of ``likeliest`` can."""
        self._sort()
        return len(self._loads) <= _NUM_LISTED and self._prefills.key_of_last(_NUM_LISTED) > now

    def _sort(self) -> None:
        for instance_id in self._changed:
            self._place(self._instances[instance_id])
        self._changed.clear()

    def _place(self, instance: Instance) -> None:
        instance_id, work = instance.instance_id, instance.work
        if instance.is_loading:
            self._loads.put(instance_id, instance.loaded_at + work.queue.work_s(), work.num_choices)
            return
        if instance.plays_prefill:
            # A lower bound of the time when the instance can take another prompt.
            begin_at = work.queue.end_at() - instance.full_step_s if len(work.queue) else -math.inf
            if instance.plays_decode and work.has_answers:
                decode_s = instance.latency.tbt_s(work.num_choices, work.num_attended)
                begin_at = max(begin_at, work.queue.paused_until(decode_s))
            self._prefills.put(instance_id, begin_at, work.num_choices)
        if instance.plays_decode:
            self._decodes.put(instance_id, work.num_choices, 0)


class _Order:
    """Instances in the order of two keys."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._sorted: list[_Key] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def put(self, instance_id: str, first: float, second: int) -> None:
        key = first, second, instance_id
        before = self._keys.get(instance_id)
        if before == key:
            return
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]
        self._keys[instance_id] = key
        insort(self._sorted, key)

    def first(self, number: int) -> Iterator[str]:
        return (key[2] for key in islice(self._sorted, number))

    def key_of_last(self, number: int) -> float:
        """Key of the last of the first ``number`` entries; infinite if there are no further entries."""
        return self._sorted[number - 1][0] if len(self._sorted) > number else math.inf

"""The earliest time at which a version is due."""

from __future__ import annotations

import math
from random import Random

from torchrelay.scheduler.policy.queue.due_times import DueTimes


def test_earliest_due_time_ignores_removed_entries() -> None:
    due, random = DueTimes(), Random(1)
    assert due.earliest == math.inf
    for _ in range(2000):
        version_id = f"v{random.randrange(20)}"
        if random.random() < 0.3:
            due.pop(version_id, None)
        else:
            due[version_id] = float(random.randrange(50))
        assert due.earliest == min(due.values(), default=math.inf)

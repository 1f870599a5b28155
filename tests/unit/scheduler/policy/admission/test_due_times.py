import math
from random import Random

from torchrelay.scheduler.policy.admission.due_times import DueTimes


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


def test_passed_versions_are_removed_in_order_of_due_time() -> None:
    due = DueTimes()
    for version_id, at in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("b", 2.5)):
        due[version_id] = at
    assert due.passed(2.5) == ["c", "b"]
    assert due == {"a": 3.0} and due.earliest == 3.0
    assert due.passed(2.5) == []


def test_note_keeps_earlier_due_time() -> None:
    due = DueTimes()
    for at, expected in ((2.0, 2.0), (3.0, 2.0), (1.0, 1.0)):
        due.note("a", at)
        assert due == {"a": expected} and due.earliest == expected

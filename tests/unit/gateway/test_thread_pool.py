from __future__ import annotations

import os
import sys

from torchrelay.gateway.thread_pool import batch_executor


def policy() -> int:
    """The scheduling policy of the calling thread; 0 is the default."""
    return os.sched_getscheduler(0) if sys.platform == "linux" else 0


def test_they_leave_the_core_to_who_wakes_them_and_the_loop_is_as_before() -> None:
    with batch_executor(1, "side") as threads:
        assert threads.submit(policy).result() == (os.SCHED_BATCH if sys.platform == "linux" else 0)
    assert policy() == 0

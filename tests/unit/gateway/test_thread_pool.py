from __future__ import annotations

import os
import sys

from torchrelay.gateway.thread_pool import batch_executor


def policy() -> int:
    """The scheduling policy of the calling thread; 0 is the default."""
    return os.sched_getscheduler(0) if sys.platform == "linux" else 0


def test_batch_threads_yield_the_core() -> None:
    with batch_executor(1, "side") as threads:
        assert threads.submit(policy).result() == (os.SCHED_BATCH if sys.platform == "linux" else 0)
    assert policy() == 0

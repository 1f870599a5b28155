"""Work on several files at once: results in order, errors that end the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from torchrelay.cli.api.parallel import NUM_THREADS, Ended, in_parallel


def test_results_are_in_the_order_of_the_items() -> None:
    all_run = threading.Barrier(NUM_THREADS)

    def work(item: int, check: Callable[[], None]) -> int:
        all_run.wait(10)
        return item * item

    assert in_parallel(work, range(2 * NUM_THREADS)) == [item * item for item in range(2 * NUM_THREADS)]
    assert in_parallel(work, []) == []


def test_an_error_ends_the_other_work() -> None:
    runs, has_ended = threading.Event(), threading.Event()

    def work(item: int, check: Callable[[], None]) -> None:
        if item:
            runs.wait(10)
            raise ValueError(item)
        runs.set()
        try:
            while True:
                check()
        except Ended:
            has_ended.set()
            raise

    with pytest.raises(ValueError, match="1"):
        in_parallel(work, [0, 1])
    assert has_ended.wait(10)

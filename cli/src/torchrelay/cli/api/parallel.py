"""Work on several files at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
NUM_THREADS = 4


class Ended(Exception):
    """Ends work whose result nobody waits for any more."""


def in_parallel(work: Callable[[T, Callable[[], None]], R], items: Sequence[T]) -> list[R]:
    """The results of ``work`` for each item, on a few threads. Raises the first error, or an interrupt.

    ``work`` also gets a function to call from time to time, which raises ``Ended`` once other work has failed.
    """
    indices, ended = iter(range(len(items))), threading.Event()
    outcomes = SimpleQueue[tuple[int, R] | Exception]()

    def check() -> None:
        if ended.is_set():
            raise Ended

    def run() -> None:
        try:
            for index in indices:
                check()
                outcomes.put((index, work(items[index], check)))
        except Exception as error:  # for the thread that waits
            outcomes.put(error)

    # Daemons: an interrupted program does not wait for a gateway that hangs.
    for _ in range(min(NUM_THREADS, len(items))):
        threading.Thread(target=run, daemon=True).start()
    results: dict[int, R] = {}
    try:
        while len(results) < len(items):
            outcome = outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            results[outcome[0]] = outcome[1]
    finally:
        ended.set()
    return [results[index] for index in range(len(items))]

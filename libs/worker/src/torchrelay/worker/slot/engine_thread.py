"""The thread that owns the engine: everything that touches torch happens on it, between or within its steps.

All of it, the warm-up too: a second thread that computed even once keeps a team of OpenMP threads of its own, and with
more of them than cores, waiting for one another means sleeping: half as much again on every step of a CPU.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torchrelay.common.errors import Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.engine.core import LoadFailed, StepResult
from torchrelay.engine.instance import Instance

log = get_logger(__name__)
T = TypeVar("T")
MAX_PENDING_KV_WRITES = 256
_STOP_POLL_S = 0.1
_MAX_IDLE_WAIT_S = 3600.0  # a queue cannot be waited at for as long as a deadline may be away


class EngineThread:
    """Runs ``instance.step()`` while there is work or a group is late, and commands between steps.

    ``on_step`` and ``on_fault`` are called on the event loop, in the order of the steps.
    """

    def __init__(self, on_step: Callable[[StepResult], None], on_fault: Callable[[Exception], None]) -> None:
        self.instance: Instance | None = None  # set and read on the engine's thread
        self._on_step, self._on_fault = on_step, on_fault
        self._loop = asyncio.get_running_loop()
        # The event loop never waits here, nor is refused: what it posts is bounded by the attempts, a few for each.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes = threading.BoundedSemaphore(MAX_PENDING_KV_WRITES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the commands already given; later ones are not run."""
        self._closed.set()
        self._commands.put(None)
        self._thread.join()

    def post(self, command: Callable[[], object]) -> None:
        """Runs ``command`` before the next step."""
        if not self._closed.is_set():
            self._commands.put(lambda: self._guarded(command))

    def wake(self) -> None:
        """(any thread) The instance may have work now, though nothing was asked of it."""
        self.post(lambda: None)

    def write(self, command: Callable[[], object], stop: threading.Event) -> None:
        """(threads that receive) Like ``post``, but waits while ``MAX_WRITES`` of these wait already.

        So a step that waits for layers holds back the senders of KV rather than filling the memory. Does nothing once
        ``stop`` is set or the thread is closed.
        """
        while not self._writes.acquire(timeout=_STOP_POLL_S):
            if stop.is_set() or self._closed.is_set():
                return

        def run() -> None:
            self._writes.release()
            command()

        self.post(run)

    async def call(self, command: Callable[[], T]) -> T:
        """Runs ``command`` before the next step and returns what it returns or raises.

        It runs even if the caller is cancelled meanwhile. Raises ``Unavailable`` when the thread has ended.
        """
        if self._closed.is_set():
            raise Unavailable("this worker is shutting down")
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = command()
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                self._loop.call_soon_threadsafe(_settle, future, result, None)

        self.post(run)
        return await future

    def _run(self) -> None:
        while self._run_commands():
            self._step()

    def _run_commands(self) -> bool:
        """Runs what waits; without work, sleeps until a command comes or a deadline. False: time to end."""
        while True:
            max_sleep_s = None if self.instance is None else self.instance.max_sleep_s()
            try:
                command = self._commands.get(
                    max_sleep_s != 0, None if max_sleep_s is None else min(max_sleep_s, _MAX_IDLE_WAIT_S)
                )
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _step(self) -> None:
        assert self.instance is not None
        try:
            result = self.instance.step()
        except LoadFailed as error:
            self.instance = None
            self._loop.call_soon_threadsafe(self._on_fault, error)
        except Exception as error:
            # The batch cannot be trusted any more, and nobody knows which sequence broke it: the slot is given up.
            log.error("engine_step_failed", exc_info=True)
            self.instance = None
            self._loop.call_soon_threadsafe(self._on_fault, error)
        else:
            self._loop.call_soon_threadsafe(self._on_step, result)

    def _guarded(self, command: Callable[[], object]) -> None:
        try:
            command()
        except Exception as error:
            log.error("engine_command_failed", exc_info=True)
            self._loop.call_soon_threadsafe(self._on_fault, error)


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():  # the caller left
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

"""The thread that owns the engine: everything that touches torch happens on it, between or within its steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torchrelay.common.errors import Overloaded
from torchrelay.common.telemetry import get_logger
from torchrelay.engine.core import LoadFailed, StepResult
from torchrelay.engine.instance import Instance

log = get_logger(__name__)
T = TypeVar("T")
MAX_COMMANDS = 8192


class EngineThread:
    """Runs ``instance.step()`` while there is work, and commands between steps.

    ``on_step`` and ``on_fault`` are called on the event loop, in the order of the steps.
    """

    def __init__(self, on_step: Callable[[StepResult], None], on_fault: Callable[[Exception], None]) -> None:
        self.instance: Instance | None = None  # set and read on the engine's thread
        self._on_step, self._on_fault = on_step, on_fault
        self._loop = asyncio.get_running_loop()
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_COMMANDS)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the commands already given."""
        self._commands.put(None)
        self._thread.join()

    def post(self, command: Callable[[], object]) -> None:
        """Runs ``command`` before the next step. Raises ``Overloaded`` when too many wait."""
        try:
            self._commands.put_nowait(lambda: self._guarded(command))
        except queue.Full:
            raise Overloaded("the engine has too many commands waiting; try again") from None

    async def call(self, command: Callable[[], T]) -> T:
        """Runs ``command`` before the next step and returns what it returns or raises."""
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
        """Runs what waits; without work, waits for a command. False: time to end."""
        while True:
            idle = self.instance is None or not self.instance.has_work()
            try:
                command = self._commands.get(block=idle)
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

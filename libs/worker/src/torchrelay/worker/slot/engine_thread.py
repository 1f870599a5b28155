"""The thread that owns the engine: everything that touches torch runs on it, in its steps or between them.

This includes the warm-up: a second thread that computes even once keeps its own team of OpenMP threads. With more
threads than cores they sleep while they wait for one another, and every step on a CPU takes half as long again.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, TypeVar

from torchrelay.common.errors import Conflict, Unavailable
from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.common.liveness import EngineProgress
from torchrelay.common.process.telemetry import get_logger
from torchrelay.engine.core import LoadFailed, StepResult
from torchrelay.engine.instance import Instance
from torchrelay.worker.slot.engine import ServedModel

log = get_logger(__name__)
T = TypeVar("T")
_STOP_POLL_S = 0.1
_MAX_IDLE_WAIT_S = 3600.0  # Queue.get takes no timeout as long as a deadline may be away
# Durations that nothing predicts: of a command, such as the mapping of a large model, and of the first step with a pack
# or a step that records a decode graph, which may compile kernels.
_COMMAND_S = 60.0
_FIRST_STEP_S = 30.0


class EngineThread:
    """Runs ``instance.step()`` while there is work or a deadline has passed, and runs commands between steps.

    ``on_step`` and ``on_fault`` are called on the event loop, in the order of the steps.
    """

    def __init__(
        self,
        on_step: Callable[[StepResult], None],
        on_fault: Callable[[Exception], None],
        max_pending_writes: int = 256,
    ) -> None:
        self.instance: ServedModel | None = None  # set on the engine's thread; others may read it
        self._on_step, self._on_fault = on_step, on_fault
        self._loop = asyncio.get_running_loop()
        # Unbounded, so that the event loop never blocks: each attempt posts only a few commands.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._short_commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._writes = threading.BoundedSemaphore(max_pending_writes)
        self._closed = threading.Event()
        self._num_done = 0  # commands and steps
        self._doing: Literal["command", "step"] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the commands already posted; later ones do not run."""
        self._closed.set()
        self._commands.put(None)
        self._thread.join()

    @property
    def relay_instance(self) -> Instance | None:
        """(any thread) The instance, if it can hand KV and prompts over."""
        instance = self.instance
        return instance if isinstance(instance, Instance) else None

    def require_instance(self) -> ServedModel:
        """(any thread) The instance. Raises ``Conflict`` if it was unloaded."""
        if (instance := self.instance) is None:
            raise Conflict("the instance was unloaded")
        return instance

    def require_relay_instance(self) -> Instance:
        """(any thread) ``relay_instance``. Raises ``Conflict`` without it."""
        self.require_instance()
        if (instance := self.relay_instance) is None:
            raise Conflict("this instance's engine hands nothing over")
        return instance

    def progress(self, latency: LatencyModel | None) -> EngineProgress:
        """(any thread) The progress of the engine. ``latency`` predicts the steps of its instance."""
        instance, doing = self.instance, self._doing
        has_work = doing is not None or not self._commands.empty()
        if instance is None:
            return EngineProgress(self._num_done, has_work, _COMMAND_S)
        is_recording = instance.is_recording  # read before the advances: the end of a recording is one
        step_s = latency.step_s(instance.running_work) if latency is not None and not is_recording else None
        return EngineProgress(
            self._num_done + instance.num_advances,
            has_work,
            _COMMAND_S if doing != "step" else _FIRST_STEP_S if step_s is None else step_s,
        )

    def post(self, command: Callable[[], object]) -> None:
        """Runs ``command`` before the next step."""
        if not self._closed.is_set():
            self._commands.put(lambda: self._guarded(command))

    def wake(self) -> None:
        """(any thread) Makes the thread check whether the instance has work."""
        self.post(lambda: None)

    def write(self, command: Callable[[], object], stop: threading.Event) -> None:
        """(receiving threads) Runs ``command`` like ``post``, but blocks while ``max_pending_writes`` writes are
        queued.

        Does nothing once ``stop`` is set or the thread is closed.
        """
        # During a long step, KV must wait at its senders instead of filling this worker's memory.
        while not self._writes.acquire(timeout=_STOP_POLL_S):
            if stop.is_set() or self._closed.is_set():
                return

        def run() -> None:
            self._writes.release()
            command()

        self.post(run)

    def call(self, command: Callable[[], T]) -> asyncio.Future[T]:
        """Runs ``command`` before the next step; the future has its result or its exception.

        It runs even if the caller is cancelled. Raises ``Unavailable`` when the thread has ended.
        """
        run, future = self._with_future(command)
        self.post(run)
        return future

    def call_between_layers(self, command: Callable[[], T]) -> asyncio.Future[T]:
        """Runs a short command like ``call``, but also between two layers of the running step.

        It must not touch the prompts and answers that the step computes.
        """
        run, future = self._with_future(command)
        self._short_commands.put(run)
        self.post(self.run_short_commands)
        return future

    def run_short_commands(self) -> None:
        """(engine's thread) Runs the commands of ``call_between_layers``."""
        while not self._short_commands.empty():
            self._short_commands.get_nowait()()

    def _with_future(self, command: Callable[[], T]) -> tuple[Callable[[], None], asyncio.Future[T]]:
        if self._closed.is_set():
            raise Unavailable("this worker is shutting down")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that is cancelled now cannot cancel the command

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        return run, asyncio.wrap_future(future)

    def _run(self) -> None:
        while self._run_commands():
            self._doing = "step"
            self._step()
            self._num_done += 1
            self._doing = None

    def _run_commands(self) -> bool:
        """Runs queued commands; without work, sleeps until a command comes or a deadline passes. False: closed."""
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
            self._doing = "command"
            command()
            self._num_done += 1
            self._doing = None

    def _step(self) -> None:
        assert self.instance is not None
        try:
            result = self.instance.step()
        except Exception as error:
            # The state of the batch and the sequence that caused the error are unknown: give up the instance.
            if not isinstance(error, LoadFailed):
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

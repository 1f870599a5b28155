"""The life of a service process: start, publish addresses, wait for a signal, shut down in order."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.process.descriptors import raise_descriptor_limit
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.common.process.telemetry import Telemetry, get_logger
from torchrelay.common.process.watchdog import watched_event_loop

log = get_logger(__name__)
Addresses = Mapping[str, str]
SHUTDOWN_S = 12  # after the grace, for the shutdown itself


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that serves, and has to end or hand over its work before it shuts down.

    ``leave(grace_s)`` reports that the process leaves, and returns once nothing runs here any more, at most after
    ``grace_s``. A second signal cancels it.
    """

    addresses: Addresses
    leave: Callable[[float], Coroutine[None, None, None]]


Served = Addresses | Serving


@contextmanager
def published_addresses(path: Path | None, addresses: Addresses) -> Iterator[None]:
    """Writes ``addresses`` and the pid to ``path`` (atomically) for as long as the block runs."""
    if path is None:
        yield
        return
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({**addresses, "pid": os.getpid()}))
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def run_service(
    name: str,
    settings: ServiceSettings,
    serving: Callable[[], AbstractAsyncContextManager[Served]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    stop_limit_s: int | None = None,
) -> None:
    """Runs ``serving()`` until SIGTERM or SIGINT.

    ``serving`` is an async context manager that yields the process's addresses once it serves (for the ready file) and
    shuts down in order on exit. If it yields ``Serving``, SIGTERM first gives it ``grace_s`` to leave; SIGINT, or a
    second signal, shuts it down at once. If ``serving`` raises, the process ends with status 1: with a sentence for an
    expected error while it starts, otherwise with a traceback. ``stop_limit_s`` after the first signal the kernel ends
    it, whatever it still waits for; None: soon after ``grace_s``; 0: never.
    """
    if stop_limit_s is None:
        stop_limit_s = math.ceil(settings.grace_s) + SHUTDOWN_S
    raise_descriptor_limit()
    try:
        with start_faults():
            telemetry = Telemetry(name, settings)
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(_until_signal(settings, serving, stop_limit_s))
        finally:
            telemetry.close()
    except CannotStart as error:
        sys.exit(f"torchrelay-{name}: {error}")


class CannotStart(Exception):
    """A process cannot start; says why, and names the setting at fault."""


@contextmanager
def start_faults() -> Iterator[None]:
    """Turns errors that are expected while a process starts, also within groups, into ``CannotStart``."""
    try:
        yield
    except (TorchrelayError, OSError, BaseExceptionGroup) as raised:
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, TorchrelayError):
            where = f"{error.field} (TORCHRELAY_{error.field.upper()}): " if error.field else ""
            raise CannotStart(f"{where}{error.message}") from raised
        if isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename else ""
            raise CannotStart(f"{where}{error.strerror or error}") from raised
        raise


class _Stop:
    """Handles a signal: a serving process leaves and shuts down in order; a starting one is cancelled, as it may be
    waiting for a broker that never comes.

    ``at_once``: the process has no time to leave.
    """

    def __init__(self, limit_s: int) -> None:
        self.requested, self.at_once = asyncio.Event(), asyncio.Event()
        self._limit_s = limit_s
        self._starting = asyncio.current_task()

    def started(self) -> None:
        self._starting = None

    def __call__(self, number: signal.Signals) -> None:
        if self.requested.is_set() or number is signal.SIGINT:
            self.at_once.set()
        if self._limit_s and not self.requested.is_set():
            # By the kernel: threads that hang on a disk are joined when the interpreter exits, which may be never.
            signal.alarm(self._limit_s)
        self.requested.set()
        if self._starting is not None:
            self._starting.cancel()


async def _until_signal(
    settings: ServiceSettings, serving: Callable[[], AbstractAsyncContextManager[Served]], stop_limit_s: int
) -> None:
    stop = _Stop(stop_limit_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        async with AsyncExitStack() as stack:
            with ExitStack() as published:  # `torchrelay up` takes a process without a ready file for one that leaves
                with start_faults():
                    served = await stack.enter_async_context(serving())
                    stop.started()
                    addresses = served.addresses if isinstance(served, Serving) else served
                    published.enter_context(published_addresses(settings.ready_file, addresses))
                stack.enter_context(watched_event_loop(settings.watchdog_s))
                log.info("serving", **addresses)
                await stop.requested.wait()
            if isinstance(served, Serving):
                await _leave(served, settings.grace_s, stop.at_once)
            log.info("stopping")
    except asyncio.CancelledError:
        if not stop.requested.is_set():
            raise
        log.info("stopped_while_starting")


async def _leave(served: Serving, grace_s: float, at_once: asyncio.Event) -> None:
    """Lets the process leave until ``at_once`` is set."""
    if at_once.is_set():
        return
    log.info("leaving", grace_s=grace_s)
    async with asyncio.TaskGroup() as tasks:
        leaving, hurry = tasks.create_task(served.leave(grace_s)), tasks.create_task(at_once.wait())
        await asyncio.wait({leaving, hurry}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        hurry.cancel()

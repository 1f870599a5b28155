"""The life of a service process: start, publish addresses, wait for a signal, shut down in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from pathlib import Path

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.process.descriptors import raise_descriptor_limit
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.common.process.telemetry import Telemetry, get_logger
from torchrelay.common.process.watchdog import watched_event_loop

log = get_logger(__name__)
Addresses = Mapping[str, str]


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
    serving: Callable[[], AbstractAsyncContextManager[Addresses]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    stop_limit_s: int = 0,
) -> None:
    """Runs ``serving()`` until SIGTERM or SIGINT.

    ``serving`` is an async context manager that yields the process's addresses once it serves (for the ready file) and
    shuts down in order on exit. If it raises, the process ends with status 1: with a sentence for an expected error
    while it starts, otherwise with a traceback. ``stop_limit_s`` after the signal the kernel ends it, whatever it still
    waits for; 0: never.
    """
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
    """Handles a signal: a serving process shuts down in order; a starting one is cancelled, as it may be waiting for a
    broker that never comes.
    """

    def __init__(self, limit_s: int) -> None:
        self.requested = asyncio.Event()
        self._limit_s = limit_s
        self._starting = asyncio.current_task()

    def started(self) -> None:
        self._starting = None

    def __call__(self) -> None:
        if self._limit_s and not self.requested.is_set():
            # By the kernel: threads that hang on a disk are joined when the interpreter exits, which may be never.
            signal.alarm(self._limit_s)
        self.requested.set()
        if self._starting is not None:
            self._starting.cancel()


async def _until_signal(
    settings: ServiceSettings, serving: Callable[[], AbstractAsyncContextManager[Addresses]], stop_limit_s: int
) -> None:
    stop = _Stop(stop_limit_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        async with AsyncExitStack() as stack:
            with start_faults():
                addresses = await stack.enter_async_context(serving())
                stop.started()
                stack.enter_context(published_addresses(settings.ready_file, addresses))
            stack.enter_context(watched_event_loop(settings.watchdog_s))
            log.info("serving", **addresses)
            await stop.requested.wait()
            log.info("stopping")
    except asyncio.CancelledError:
        if not stop.requested.is_set():
            raise
        log.info("stopped_while_starting")

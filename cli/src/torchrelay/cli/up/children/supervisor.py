"""Starts the children of an embedded install in order, restarts those that die, and stops all at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from torchrelay.cli.errors import CliError
from torchrelay.cli.launchers.launcher import Launcher
from torchrelay.cli.up.children import logs
from torchrelay.cli.up.children.child import Child, ChildSpec
from torchrelay.cli.up.children.local_launcher import LocalLauncher
from torchrelay.cli.up.children.stack import Stack
from torchrelay.cli.up.disk import DiskState, disk_message, disk_state, log_limit_bytes
from torchrelay.common.host.disk import free_bytes

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
DISK_CHECK_S = 0.25
NATS = "nats"
BACKOFF_RESET_S = 30.0  # a child that ran this long starts with the first back-off again


class SupervisorListener(Protocol):
    """Receives what happens to the children."""

    def starting(self, names: Iterable[str]) -> None: ...
    def ready(self, name: str, took_s: float, address: str) -> None: ...
    def ended(self, name: str, how: str, wait_s: float) -> None: ...
    def failed(self, error: CliError) -> None: ...
    def disk(self, message: str) -> None: ...
    def stopping(self) -> None: ...


def backoff_s(previous_s: float, ran_s: float) -> float:
    """Delay before restarting a child that ran ``ran_s`` after a delay of ``previous_s``."""
    if ran_s >= BACKOFF_RESET_S or previous_s == 0:
        return FIRST_BACKOFF_S
    return min(previous_s * 2, MAX_BACKOFF_S)


class Supervisor:
    """Owns the children of one stack. ``drive``: scales the elastic ones until it is cancelled."""

    def __init__(
        self,
        stack: Stack,
        listener: SupervisorListener,
        drive: Callable[[Launcher], Coroutine[None, None, None]] | None = None,
    ) -> None:
        self._stack, self._listener, self._drive = stack, listener, drive
        self._children: dict[str, Child] = {}
        self._start_backoff_s: dict[str, float] = {}  # of elastic children whose last start failed

    async def run(self, up: Callable[[], AbstractContextManager[None]], stop: asyncio.Event) -> None:
        """Starts everything, holds ``up()`` open while it runs, and stops everything after ``stop``.

        ``stop`` may be set at any time, also during the start. Raises ``CliError`` when a child fails to start.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                living = tasks.create_task(self._live(up))
                await stop.wait()
                living.cancel()
        except ExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await self._stop_all()

    def kill_all(self) -> None:
        """Kills every child at once; ``run`` then returns as after a stop."""
        for child in self._children.values():
            child.kill()

    async def _live(self, up: Callable[[], AbstractContextManager[None]]) -> None:
        for spec in self._stack.specs:
            logs.rotate(spec.log)
        for wave in self._stack.waves:
            self._listener.starting(spec.name for spec in wave)
            async with asyncio.TaskGroup() as starting:
                for spec in wave:
                    starting.create_task(self._start(spec))
        with up():
            async with asyncio.TaskGroup() as keeping:
                for spec in (spec for wave in self._stack.waves for spec in wave):
                    keeping.create_task(self._keep(spec))
                if self._drive is not None:
                    elastic = [spec for spec in self._stack.specs if spec.name in self._stack.elastic]
                    launcher = LocalLauncher(elastic, keeping, self._run_elastic, self._stop)
                    keeping.create_task(self._drive(launcher))
                keeping.create_task(self._trim_logs())
                keeping.create_task(self._watch_disk())

    async def _start(self, spec: ChildSpec) -> None:
        child = self._children[spec.name] = await Child.start(spec)
        addresses = await child.ready()
        self._listener.ready(spec.name, child.age_s, addresses.get("http") or addresses.get("grpc") or "")

    async def _run_elastic(self, spec: ChildSpec) -> None:
        """Starts an elastic child and restarts it. If the first start fails, returns after a back-off, which doubles
        with every such failure in a row.
        """
        try:
            await self._start(spec)
        except CliError as error:
            self._listener.failed(error)
            await self._stop(spec.name)
            wait_s = self._start_backoff_s[spec.name] = backoff_s(self._start_backoff_s.get(spec.name, 0.0), 0.0)
            self._listener.ended(spec.name, "did not start", wait_s)
            await asyncio.sleep(wait_s)
            return
        self._start_backoff_s.pop(spec.name, None)
        await self._keep(spec)

    async def _stop(self, name: str) -> None:
        if child := self._children.get(name):
            await child.stop()

    async def _keep(self, spec: ChildSpec) -> None:
        """Restarts one child whenever it ends."""
        wait_s, before = 0.0, None
        while True:
            child = self._children[spec.name]
            how = await child.exited()
            # The same child again: the restart itself failed.
            wait_s = backoff_s(wait_s, child.age_s if child is not before else 0.0)
            before = child
            self._listener.ended(spec.name, how, wait_s)
            await asyncio.sleep(wait_s)
            try:
                await self._start(spec)
            except CliError as error:
                self._listener.failed(error)
                await self._children[spec.name].stop()

    async def _trim_logs(self) -> None:
        while True:
            await asyncio.sleep(logs.CHECK_EVERY_S)
            limit_bytes = log_limit_bytes(free_bytes(self._stack.home))
            for spec in self._stack.specs:
                await asyncio.to_thread(logs.truncate_if_long, spec.log, limit_bytes)
            if self._stack.traces is not None:
                traces = partial(logs.truncate_if_long, self._stack.traces, 2 * limit_bytes, is_copied=False)
                await asyncio.to_thread(traces)

    async def _watch_disk(self) -> None:
        """Reports a full disk and its recovery; after the recovery restarts NATS, which has stopped storing."""
        state = DiskState.ROOMY
        while True:
            num_free_bytes, before = free_bytes(self._stack.home), state
            state = disk_state(num_free_bytes, before)
            if state is not before:
                self._listener.disk(disk_message(state, self._stack.home, num_free_bytes))
                if before is DiskState.FULL and NATS in self._children:
                    self._children[NATS].kill()
            await asyncio.sleep(DISK_CHECK_S)

    async def _stop_all(self) -> None:
        """Group by group, in reverse: the gateway first, the brokers last."""
        if self._children:
            self._listener.stopping()
        for group in reversed(self._stack.groups):
            async with asyncio.TaskGroup() as stopping:
                for spec in group:
                    if child := self._children.get(spec.name):
                        stopping.create_task(child.stop())


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error: the others were cancelled because of it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

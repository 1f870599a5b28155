"""Launchers start and stop the workers of a pool; the local launcher starts them as children of `up`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Protocol

from torchrelay.cli.up.children.child import ChildSpec


class Launcher(Protocol):
    """Starts and stops workers, one slot each. Exactly one driver calls it."""

    def members(self) -> Collection[str]:
        """Ids of the workers that it runs, starting ones included."""

    def scale(self, num_slots: int) -> None:
        """Starts workers until there are ``num_slots``, as far as it can; stops none."""

    async def retire(self, worker_id: str) -> None:
        """Stops a worker. Returns when its process is gone."""


class LocalLauncher:
    """Runs workers as children. ``run``: starts a child and restarts it until cancelled; ``stop``: ends its process."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        tasks: asyncio.TaskGroup,
        run: Callable[[ChildSpec], Coroutine[None, None, None]],
        stop: Callable[[str], Awaitable[None]],
    ) -> None:
        self._specs, self._tasks, self._run, self._stop = specs, tasks, run, stop
        self._running: dict[str, asyncio.Task[None]] = {}

    def members(self) -> Collection[str]:
        return tuple(self._running)

    def scale(self, num_slots: int) -> None:
        for spec in self._specs:
            if len(self._running) >= num_slots:
                return
            if spec.name not in self._running:
                self._running[spec.name] = self._tasks.create_task(self._run_member(spec))

    async def retire(self, worker_id: str) -> None:
        if (task := self._running.get(worker_id)) is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._stop(worker_id)

    async def _run_member(self, spec: ChildSpec) -> None:
        try:
            await self._run(spec)
        finally:
            del self._running[spec.name]

"""The launcher of `up`: workers are its children."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

from torchrelay.cli.up.children.child import ChildSpec


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
        self._retiring: set[str] = set()  # their processes may still run

    def members(self) -> Collection[str]:
        return tuple(self._running)

    def waiting(self) -> Mapping[str, str]:
        return {}  # a process begins at once

    def scale(self, num_slots: int) -> None:
        for spec in self._specs:
            if len(self._running) >= num_slots:
                return
            if spec.name not in self._running and spec.name not in self._retiring:
                self._running[spec.name] = self._tasks.create_task(self._run_member(spec))

    def retire(self, worker_id: str) -> None:
        self._retiring.add(worker_id)
        self._tasks.create_task(self._retire(worker_id, self._running.pop(worker_id)))

    async def _retire(self, worker_id: str, running: asyncio.Task[None]) -> None:
        running.cancel()
        await asyncio.wait({running})
        await self._stop(worker_id)
        self._retiring.remove(worker_id)

    async def _run_member(self, spec: ChildSpec) -> None:
        try:
            await self._run(spec)
        finally:
            self._running.pop(spec.name, None)  # absent if it retires

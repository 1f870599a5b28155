"""Keeps the children of an embedded install running: starts them in order, restarts what dies, stops all at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from torchrelay.cli.problems import Problem
from torchrelay.cli.up.child import Child, ChildSpec
from torchrelay.cli.up.stack import Stack

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STEADY_S = 30.0  # a child that ran this long begins its back-off anew

Tell = Callable[[str, str], None]  # name, what happened


def backoff_s(previous_s: float, ran_s: float) -> float:
    """How long to wait before the next start of a child that ran ``ran_s`` and waited ``previous_s`` before."""
    if ran_s >= STEADY_S or previous_s == 0:
        return FIRST_BACKOFF_S
    return min(previous_s * 2, MAX_BACKOFF_S)


class Supervisor:
    """Owns the children of one stack."""

    def __init__(self, stack: Stack, tell: Tell) -> None:
        self._stack, self._tell = stack, tell
        self._children: dict[str, Child] = {}

    async def run(self, up: Callable[[], Awaitable[None]]) -> None:
        """Starts everything, calls ``up`` once all is ready, and returns when ``up`` does, with everything stopped.

        Raises ``Problem`` when a child does not come up at the first start.
        """
        try:
            for wave in (self._stack.brokers, self._stack.services):
                await asyncio.gather(*(self._start(spec) for spec in wave))
            async with asyncio.TaskGroup() as keeping:
                keepers = [
                    keeping.create_task(self._keep(spec)) for spec in (*self._stack.brokers, *self._stack.services)
                ]
                await up()
                for keeper in keepers:
                    keeper.cancel()
        finally:
            await self._stop_all()

    async def _start(self, spec: ChildSpec) -> None:
        child = self._children[spec.name] = await Child.start(spec)
        begin = time.monotonic()
        addresses = await child.ready()
        where = addresses.get("http") or addresses.get("grpc") or ""
        self._tell(spec.name, f"ready in {time.monotonic() - begin:.1f} s  {where}")

    async def _keep(self, spec: ChildSpec) -> None:
        """Restarts one child whenever it ends."""
        wait_s = 0.0
        while True:
            begin = time.monotonic()
            status = await self._children[spec.name].exited()
            wait_s = backoff_s(wait_s, time.monotonic() - begin)
            self._tell(spec.name, f"ended with status {status}; starting again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            try:
                await self._start(spec)
            except Problem as problem:
                self._tell(spec.name, problem.message)
                await self._children[spec.name].stop()

    async def _stop_all(self) -> None:
        """In reverse order of the start: the door first, the brokers last; workers together."""
        specs = [*self._stack.brokers, *self._stack.services]
        for name in (spec.name for spec in reversed(specs)):
            child = self._children.get(name)
            if child is not None:
                await child.stop()

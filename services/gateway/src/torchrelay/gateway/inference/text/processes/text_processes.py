"""Turns prompts into token ids in processes that can be killed: a shared pool, and a pool for suspects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Self

from opentelemetry.metrics import Meter

from torchrelay.common.host.machine import available_cores
from torchrelay.gateway.inference.text.processes.frames import Answer, Prompt, TextLimits, frame_of
from torchrelay.gateway.inference.text.processes.metrics import TextMetrics
from torchrelay.gateway.inference.text.processes.process_connection import LocalFile
from torchrelay.gateway.inference.text.processes.suspects import Suspects
from torchrelay.gateway.inference.text.processes.text_pool import PoolSettings, TextPool

MAX_DEFAULT_PROCESSES: Final = 8
SUSPECTS_NICENESS: Final = 19


def default_num_processes() -> int:
    """A process per core, within limits; at least two, so that no tenant ever holds all."""
    return min(max(2, available_cores()), MAX_DEFAULT_PROCESSES)


class TextProcesses:
    """Renders and encodes prompts, fairly between tenants.

    A tenant uses at most all processes but one. A tenant whose prompt ended its process is confined to a process that
    it shares with other suspects, so that it cannot keep emptying the caches of others.
    """

    def __init__(
        self,
        limits: TextLimits,
        settings: PoolSettings,
        meter: Meter | None = None,
    ) -> None:
        metrics = TextMetrics(lambda: len(self.pids), meter)
        self._suspects = Suspects()
        shared = replace(settings, max_running=max(1, settings.max_processes - 1), num_kept=1)
        confined = replace(shared, max_processes=1, max_running=1, num_kept=0, niceness=SUSPECTS_NICENESS)
        self._pool = TextPool(shared, limits, metrics, self._suspect)
        self._suspects_pool = TextPool(confined, limits, metrics, self._suspect)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._pool.close()
        await self._suspects_pool.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that take prompts."""
        return self._pool.pids + self._suspects_pool.pids

    async def run(self, tenant: str, model: str, prompt: Prompt, files: Sequence[LocalFile]) -> Answer:
        """The answer to ``prompt``, whose ``files`` these are. Raises what ``TextPool.run`` does."""
        is_suspect = self._suspects.is_suspect(tenant, model, asyncio.get_running_loop().time())
        pool = self._suspects_pool if is_suspect else self._pool
        return await pool.run(tenant, model, frame_of(prompt), files)

    def _suspect(self, tenant: str, model: str) -> None:
        self._suspects.note(tenant, model, asyncio.get_running_loop().time())

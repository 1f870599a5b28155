"""Which parts that the gateway needs answer. Without its database it is useless; without others it is degraded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

ASK_EVERY_S = 1.0
WAIT_S = 1.0
GIVE_UP_S = 5.0
SILENT = "does not answer"
Ask = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What is wrong with which part."""

    essential: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return "unavailable" if self.essential else "degraded" if self.others else "ok"

    @property
    def fault(self) -> str:
        """Why the gateway cannot serve; empty if it can."""
        return ", ".join(f"the {name} {fault}" for name, fault in self.essential.items())


class Health:
    """Asks all parts at once, and at most every ``ask_every_s``, however often it is asked itself.

    Each part says what is wrong with it, empty if nothing; one that says nothing within ``wait_s`` does not answer.
    """

    def __init__(
        self,
        essential: Mapping[str, Ask],
        others: Mapping[str, Ask],
        *,
        wait_s: float = WAIT_S,
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        self._essential, self._others = essential, others
        self._wait_s, self._ask_every_s = wait_s, ask_every_s
        self._asking: dict[str, asyncio.Task[str]] = {}
        self._last = HealthReport()
        self._last_at_s = float("-inf")
        self._one_at_a_time = asyncio.Lock()

    async def report(self) -> HealthReport:
        """Within ``wait_s``, and a little for those who came before."""
        async with self._one_at_a_time:
            if time.monotonic() - self._last_at_s >= self._ask_every_s:
                for name, ask in {**self._essential, **self._others}.items():
                    if name not in self._asking:
                        self._asking[name] = asyncio.create_task(_answer(ask))
                await asyncio.wait(self._asking.values(), timeout=self._wait_s)
                faults = {name: asking.result() if asking.done() else SILENT for name, asking in self._asking.items()}
                # Who has not answered is asked no second time: its answer may still come.
                self._asking = {name: asking for name, asking in self._asking.items() if not asking.done()}
                faults = {name: fault for name, fault in faults.items() if fault}
                self._last = HealthReport(
                    {name: fault for name, fault in faults.items() if name in self._essential},
                    {name: fault for name, fault in faults.items() if name in self._others},
                )
                self._last_at_s = time.monotonic()
            return self._last

    async def fault(self) -> str:
        """For health checks by gRPC."""
        return (await self.report()).fault

    async def close(self) -> None:
        for asking in self._asking.values():
            asking.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)


async def _answer(ask: Ask) -> str:
    try:
        async with asyncio.timeout(GIVE_UP_S):  # then over a new connection
            return await ask()
    except TimeoutError:
        return SILENT

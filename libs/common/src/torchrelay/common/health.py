"""The health of a service: which of the parts that it needs do not answer.

Without an essential part it cannot serve; without another it is degraded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)
WAIT_S = 1.0
SILENT = "does not answer"
Ask = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The fault of each failing part, by its name."""

    essential: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return "unavailable" if self.essential else "degraded" if self.others else "ok"

    @property
    def fault(self) -> str:
        """Why the service cannot serve; empty if it can."""
        return ", ".join(f"the {name} {fault}" for name, fault in self.essential.items())


class Health:
    """Asks all parts at once, and at most every ``ask_every_s``, however often it is asked itself.

    Each part returns its fault, empty if there is none. A part without an answer for ``silent_s`` does not answer; a
    part whose question raises fails, and is asked again the next time.
    """

    def __init__(
        self,
        essential: Mapping[str, Ask],
        others: Mapping[str, Ask],
        *,
        silent_s: float = WAIT_S,
        ask_every_s: float = 1.0,
    ) -> None:
        self._essential, self._others = essential, others
        self._silent_s, self._ask_every_s = silent_s, ask_every_s
        self._asking: dict[str, _Asking] = {}
        self._last = HealthReport()
        self._last_at_s = float("-inf")
        self._one_at_a_time = asyncio.Lock()
        self._leaving = ""

    async def report(self) -> HealthReport:
        """The current report, or that the service leaves.

        Takes at most ``WAIT_S``, and twice that for a call that waits for an earlier one.
        """
        if self._leaving:
            return HealthReport({self._leaving: "leaves"})
        async with self._one_at_a_time:
            if time.monotonic() - self._last_at_s >= self._ask_every_s:
                self._last = await self._ask_all()
                self._last_at_s = time.monotonic()
            return self._last

    def leave(self, name: str) -> None:
        """Makes all further reports say that the service ``name`` leaves, so that it is sent nothing more."""
        self._leaving = name

    async def _ask_all(self) -> HealthReport:
        for name, ask in {**self._essential, **self._others}.items():
            if name not in self._asking:  # an open question is not repeated: its answer may still come
                self._asking[name] = _Asking(asyncio.create_task(self._answer(name, ask)), time.monotonic())
        await asyncio.wait([asking.task for asking in self._asking.values()], timeout=min(WAIT_S, self._silent_s))
        now_s = time.monotonic()
        faults = {name: asking.fault(now_s, self._silent_s) for name, asking in self._asking.items()}
        self._asking = {name: asking for name, asking in self._asking.items() if not asking.task.done()}
        return HealthReport(
            {name: faults[name] for name in self._essential if faults[name]},
            {name: faults[name] for name in self._others if faults[name]},
        )

    async def _answer(self, name: str, ask: Ask) -> str:
        try:
            async with asyncio.timeout(5 * self._silent_s):  # then it is asked again: its connection may be dead
                return await ask()
        except TimeoutError:
            return SILENT
        except Exception as error:  # a probe cannot know all errors of its driver; the other parts are reported
            log.warning("health_probe_failed", part=name, error=repr(error)[:200])
            return f"fails: {type(error).__name__}"

    async def fault(self) -> str:
        """The fault for health checks by gRPC: why the service cannot serve; empty if it can."""
        return (await self.report()).fault

    async def close(self) -> None:
        tasks = [asking.task for asking in self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Asking:
    task: asyncio.Task[str]
    begin_s: float

    def fault(self, now_s: float, silent_s: float) -> str:
        if self.task.done():
            return self.task.result()
        return SILENT if now_s - self.begin_s >= silent_s else ""

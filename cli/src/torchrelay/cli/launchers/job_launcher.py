"""The launcher whose workers are jobs on other machines."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from torchrelay.cli.errors import CliError
from torchrelay.cli.launchers.jobs import JobError, Jobs

LOOK_EVERY_S = 1.0
SHORT_S = 20.0  # a job that ran for less delays the next start
MAX_BACKOFF_S = 60.0
CLOSE_S = 60.0


@dataclass(slots=True)
class _Member:
    """A worker that is wanted, and the progress of its job."""

    is_submitted: bool = False
    running_since: float | None = None


class JobLauncher:
    """Makes the jobs equal to its members. Jobs of an earlier run of `up` are members from the beginning.

    A worker whose job has ended is no member any more; the next ``scale`` adds another under a new id. ``scope``: the
    beginning of the ids. ``on_error`` receives what goes wrong; a fault of the engine once until it answers again.
    """

    def __init__(self, jobs: Jobs, scope: str, on_error: Callable[[CliError], None]) -> None:
        self._jobs, self._scope, self._on_error = jobs, scope, on_error
        self._members: dict[str, _Member] | None = None  # None until the engine has answered
        self._stopped: set[str] = set()  # their jobs may not have ended
        self._backoff_s, self._next_start_s = 0.0, 0.0
        self._last_fault = ""
        self._changed = asyncio.Event()

    def members(self) -> Collection[str]:
        return tuple(self._members or ())

    def waiting(self) -> Collection[str]:
        return tuple(name for name, member in (self._members or {}).items() if member.running_since is None)

    def scale(self, num_slots: int) -> None:
        if self._members is None:
            return  # how many jobs there are is not known
        for _ in range(num_slots - len(self._members)):
            self._members[self._scope + secrets.token_hex(4)] = _Member()
            self._changed.set()

    def retire(self, worker_id: str) -> None:
        assert self._members is not None
        del self._members[worker_id]
        self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._changed.clear()
            await self.reconcile(time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()

    async def close(self) -> None:
        """Stops all jobs, waits until they have left, for ``CLOSE_S`` at most, and closes the connection."""
        self._members = {}
        try:
            async with asyncio.timeout(CLOSE_S):
                while await self.reconcile(time.monotonic()) != 0:  # noqa: ASYNC110  engines tell nobody
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            self._on_error(CliError("jobs still run", f"they were told to leave {CLOSE_S:g} s ago"))
        finally:
            await self._jobs.close()

    async def reconcile(self, now: float) -> int | None:
        """The number of jobs that have not ended; None if the engine does not answer."""
        try:
            jobs = await self._jobs.listed()
            if self._members is None:
                self._members = {name: _Member(is_submitted=True) for name in jobs}
            await self._stop_others(jobs)
            self._note_progress(self._members, jobs, now)
            if now >= self._next_start_s:
                await self._submit(self._members)
        except JobError as error:
            if str(error) != self._last_fault:
                self._last_fault = str(error)
                self._on_error(CliError(self._last_fault, "no worker starts or stops until it answers"))
            return None
        self._last_fault = ""
        return len(jobs)

    async def _stop_others(self, jobs: Mapping[str, bool]) -> None:
        self._stopped &= jobs.keys()
        for name in jobs.keys() - self.members() - self._stopped:
            await self._jobs.stop(name)
            self._stopped.add(name)

    def _note_progress(self, members: dict[str, _Member], jobs: Mapping[str, bool], now: float) -> None:
        for name, member in tuple(members.items()):
            if name not in jobs:
                if member.is_submitted:
                    del members[name]
                    self._ended(name, member, now)
            elif jobs[name] and member.running_since is None:
                member.running_since = now

    def _ended(self, name: str, member: _Member, now: float) -> None:
        if member.running_since is not None and now - member.running_since >= SHORT_S:
            self._backoff_s = 0.0
            return
        self._backoff_s = min(max(2 * self._backoff_s, LOOK_EVERY_S), MAX_BACKOFF_S)
        self._next_start_s = now + self._backoff_s
        message = f"the job of {name} ended soon; workers start again in {self._backoff_s:g} s"
        self._on_error(CliError(message, f"see {self._jobs.output}"))

    async def _submit(self, members: dict[str, _Member]) -> None:
        for name, member in members.items():
            if not member.is_submitted:
                await self._jobs.start(name)
                member.is_submitted = True

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
from torchrelay.cli.launchers.launcher import waits_text

LOOK_EVERY_S = 1.0
SHORT_S = 20.0  # a job that ran for less delays the next start
MAX_BACKOFF_S = 60.0
WAIT_S = 30.0  # after which an operator is told why jobs wait
STOP_S = 60.0  # for a job that was told to leave; then it is ended at once


@dataclass(slots=True)
class _Member:
    """A worker that is wanted, and the progress of its job."""

    is_submitted: bool = False
    running_since: float | None = None
    waiting_since: float | None = None
    why: str = ""  # it waits, as the engine says


class JobLauncher:
    """Makes the jobs equal to its members. Jobs of an earlier run of `up` are members from the beginning.

    A worker whose job has ended is no member any more; the next ``scale`` adds another under a new id. ``scope``: the
    beginning of the ids. ``on_error`` receives what goes wrong; a fault of the engine once until it answers again.
    """

    def __init__(self, jobs: Jobs, scope: str, on_error: Callable[[CliError], None]) -> None:
        self._jobs, self._scope, self._on_error = jobs, scope, on_error
        self._members: dict[str, _Member] | None = None  # None until the engine has answered
        self._told_at: dict[str, float] = {}  # jobs that were told to leave
        self._backoff_s, self._next_start_s = 0.0, 0.0
        self._last_fault, self._told_waits = "", set[str]()
        self.has_begun = False
        self._changed, self._killed = asyncio.Event(), asyncio.Event()

    def members(self) -> Collection[str]:
        return tuple(self._members or ())

    def waiting(self) -> Mapping[str, str]:
        return {name: member.why for name, member in (self._members or {}).items() if member.running_since is None}

    def scale(self, num_slots: int) -> None:
        if self._members is None:
            return  # how many jobs there are is not known
        for _ in range(num_slots - len(self._members)):
            self._members[self._scope + secrets.token_hex(4)] = _Member()
            self._changed.set()

    def retire(self, worker_id: str) -> None:
        if self._members is not None and self._members.pop(worker_id, None) is not None:
            self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        self.has_begun = True
        while True:
            self._changed.clear()
            await self.reconcile(time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()

    async def close(self) -> None:
        """Stops all jobs, and waits until they have left or ``kill`` is called, for twice ``STOP_S`` at most."""
        self._members = {}
        num_left: int | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * STOP_S):
                while not self._killed.is_set():
                    if (num_left := await self.reconcile(time.monotonic())) == 0:
                        break
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await self._killed.wait()
        if num_left != 0:
            count = "jobs" if num_left is None else f"{num_left} jobs"
            self._on_error(CliError(f"{count} may still run", "the next `up` of this home takes them over"))
        await self._jobs.close()

    def kill(self) -> None:
        """Ends ``close`` without waiting for the jobs."""
        self._killed.set()

    async def reconcile(self, now: float) -> int | None:
        """The number of jobs that have not ended; None if the engine does not answer."""
        try:
            jobs = await self._jobs.listed()
            if self._members is None:
                self._members = {name: _Member(is_submitted=True) for name in jobs}
            faults = await self._stop_others(jobs, now)
            self._note_progress(self._members, jobs, now)
            self._tell_waits(self._members, now)
            if now >= self._next_start_s:
                await self._submit(self._members)
        except JobError as error:
            self._tell(str(error), "no worker starts or stops until it answers")
            return None
        self._tell("; ".join(faults), "these jobs do not stop")
        return len(jobs)

    def _tell(self, fault: str, meaning: str) -> None:
        """Tells of a fault, once; empty: it is over."""
        if fault and fault != self._last_fault:
            self._on_error(CliError(fault, meaning))
        self._last_fault = fault

    def _tell_waits(self, members: Mapping[str, _Member], now: float) -> None:
        """Tells why jobs have waited for ``WAIT_S``; each reason once until no job waits for it."""
        long = {
            name: member.why
            for name, member in members.items()
            if member.waiting_since is not None and now - member.waiting_since >= WAIT_S
        }
        if not set(long.values()) <= self._told_waits | {""}:
            self._on_error(CliError(waits_text(long), "they run once this is over"))
        self._told_waits = set(long.values())

    async def _stop_others(self, jobs: Mapping[str, str | None], now: float) -> list[str]:
        """Stops the jobs of no member; returns why some cannot be stopped."""
        faults: list[str] = []
        self._told_at = {name: at for name, at in self._told_at.items() if name in jobs}
        for name in jobs.keys() - self.members():
            told_at = self._told_at.get(name)
            if told_at is None or now - told_at >= STOP_S:
                try:
                    await self._jobs.stop(name, at_once=told_at is not None)
                except JobError as error:  # the other jobs go on
                    faults.append(f"{name}: {error}")
                else:
                    self._told_at[name] = now
        return faults

    def _note_progress(self, members: dict[str, _Member], jobs: Mapping[str, str | None], now: float) -> None:
        for name, member in tuple(members.items()):
            if name not in jobs:
                if member.is_submitted:
                    del members[name]
                    self._ended(name, member, now)
                continue
            member.is_submitted = True  # also if the answer to its submission was lost
            if (why := jobs[name]) is not None:
                member.why, member.waiting_since = why, now if member.waiting_since is None else member.waiting_since
            elif member.running_since is None:
                member.running_since, member.waiting_since = now, None

    def _ended(self, name: str, member: _Member, now: float) -> None:
        if member.running_since is not None and now - member.running_since >= SHORT_S:
            self._backoff_s = 0.0
            return
        self._backoff_s = min(max(2 * self._backoff_s, LOOK_EVERY_S), MAX_BACKOFF_S)
        self._next_start_s = now + self._backoff_s
        message = f"the job of {name} ended soon; workers start again in {self._backoff_s:g} s"
        self._on_error(CliError(message, f"see {self._jobs.output}"))

    async def _submit(self, members: dict[str, _Member]) -> None:
        for name, member in tuple(members.items()):
            if not member.is_submitted and name in members:
                await self._jobs.start(name)
                member.is_submitted = True

"""A child process of `torchrelay up`: start, readiness, liveness, stop."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.children.liveness import await_fault, probe_of
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.probes import Probe
from torchrelay.common.process.environment import plain_environment
from torchrelay.common.process.parent_death import tied_to_this_process

POLL_S = 0.02
PROBE_TIMEOUT_S = 2.0
GRACE_S = 5  # for open streams, when `up` stops: a person waits for it
STOP_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
TAIL_LINES = 8
TAIL_COLUMNS = 240


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to run. Our services write ``ready_file`` once they serve; brokers answer at ``broker_url``.

    ``inherited``: its environment beside ``env``. ``tls``: credentials for its gRPC server, if that uses TLS.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready_file: Path | None = None
    broker_url: str = ""
    ready_s: float = 60.0
    stop_s: float = STOP_TIMEOUT_S  # it is killed this long after SIGTERM
    tls: Tls | None = None
    inherited: Mapping[str, str] = field(default_factory=lambda: plain_environment(os.environ))


class Child:
    """A running ``ChildSpec``: the leader of its own process group."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log_begin: int) -> None:
        self.spec, self._process, self._log_begin = spec, process, log_begin
        self._begin_s = time.monotonic()
        self._probe: Probe | None = None

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        """Starts the program in its own process group, so that Ctrl-C reaches it only through `up`.

        Raises ``CliError`` when the program is not installed, or its log cannot be written.
        """
        program = shutil.which(spec.command[0])
        if program is None:
            raise CliError(f"{spec.name} cannot start: {spec.command[0]} is not installed", "run make setup")
        try:
            if spec.ready_file is not None:
                spec.ready_file.unlink(missing_ok=True)
            with spec.log.open("ab") as log:
                log_begin = log.tell()
                process = await asyncio.create_subprocess_exec(
                    *tied_to_this_process((program, *spec.command[1:])),
                    env={**spec.inherited, **spec.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise CliError(f"{spec.name} cannot start: {error}", "see whether the disk is full") from error
        return cls(spec, process, log_begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin_s

    async def exited(self) -> str:
        """Waits for the exit, kills what is left of the process group, and says how it ended.

        Once it is ready, a child that does not answer is killed.
        """
        fault = ""

        async def kill_when_hung(probe: Probe) -> None:
            nonlocal fault
            fault = await await_fault(probe, self._is_leaving)
            self.kill()

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(kill_when_hung(self._probe)) if self._probe is not None else None
            status = await self._process.wait()
            if watching is not None:
                watching.cancel()
        self.kill()
        return f"{fault}; killed" if fault else how_ended(status)

    async def ready(self) -> dict[str, str]:
        """Waits until the child serves; returns its addresses. Raises ``CliError`` with the end of its log."""
        try:
            async with asyncio.timeout(self.spec.ready_s):
                while self.returncode is None:
                    if (addresses := self._addresses()) is not None and await self._answers(addresses):
                        return addresses
                    await asyncio.sleep(POLL_S)  # there is nothing to wait on for a file and a port
        except TimeoutError:
            raise CliError(f"{self.spec.name} was not ready within {self.spec.ready_s:g} s", self._log_hint()) from None
        if (sentence := self._last_words()) is not None:
            raise CliError(f"{self.spec.name} cannot start: {sentence}", f"its log: {self.spec.log}")
        raise CliError(f"{self.spec.name} {how_ended(self.returncode or 0)} while starting", self._log_hint())

    def _addresses(self) -> dict[str, str] | None:
        if self.spec.ready_file is None:
            return {}
        try:
            written = json.loads(self.spec.ready_file.read_text())
        except FileNotFoundError:
            return None
        return {str(key): str(value) for key, value in written.items()}

    async def _answers(self, addresses: Mapping[str, str]) -> bool:
        """Whether it serves; a child that cannot be asked does."""
        probe = probe_of(self.spec.broker_url, addresses, self.spec.tls)
        if probe is None:
            return True
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                if not await probe.ask():
                    self._probe = probe
                    return True
        except TimeoutError:
            pass
        finally:
            if self._probe is None:
                await probe.close()
        return False

    def _is_leaving(self) -> bool:
        """A service that was told to stop removes its ready file first."""
        return self.spec.ready_file is not None and not self.spec.ready_file.exists()

    def _log_lines(self) -> list[str]:
        """The lines that it has written to its log."""
        with self.spec.log.open("rb") as log:
            size = self.spec.log.stat().st_size
            log.seek(self._log_begin if self._log_begin <= size else 0)  # it may have been truncated
            return log.read().decode(errors="replace").strip().splitlines()

    def _last_words(self) -> str | None:
        """Our services end with their name and the reason when they cannot start; None: it has not done so."""
        lines = self._log_lines()
        name, colon, sentence = lines[-1].partition(": ") if lines else ("", "", "")
        return sentence if colon and name == Path(self.spec.command[0]).name else None

    def _log_hint(self) -> str:
        lines = self._log_lines()
        if not lines:
            return f"it wrote nothing to {self.spec.log}"
        tail = (f"  {line[:TAIL_COLUMNS]}" for line in lines[-TAIL_LINES:])
        return "\n".join((f"the end of {self.spec.log}:", *tail))

    async def stop(self) -> None:
        """Terminates the child, kills it after a timeout, and then the rest of its group."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(self.spec.stop_s):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self.kill()

    def kill(self) -> None:
        """Kills the child and everything it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def how_ended(status: int) -> str:
    """``ended with status 2``, ``was killed by SIGKILL``."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


async def is_listening(host: str, port: int) -> bool:
    """Whether a TCP connection to it succeeds within ``CONNECT_TIMEOUT_S``."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True

"""One child process of `torchrelay up`: started, watched, and ended."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchrelay.cli.problems import Problem

_PR_SET_PDEATHSIG = 1
POLL_S = 0.02
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. A child of ours writes ``ready_file`` once it serves; other programs listen on ``ready_port``."""

    name: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready_file: Path | None = None
    ready_port: int = 0
    ready_s: float = 60.0


def _end_with_parent() -> None:
    """In the child, before exec: a killed `up` must leave nothing running (Linux; elsewhere nothing is done)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A running ``ChildSpec``."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.spec, self._process = spec, process

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        """Starts the program in a process group of its own, so that Ctrl-C reaches it only through `up`."""
        if spec.ready_file is not None:
            spec.ready_file.unlink(missing_ok=True)
        with spec.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                env={**os.environ, **spec.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return cls(spec, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def exited(self) -> int:
        return await self._process.wait()

    async def ready(self) -> dict[str, str]:
        """Waits until the child serves and returns its addresses. Raises ``Problem`` with the end of its log."""
        try:
            async with asyncio.timeout(self.spec.ready_s):
                while self.returncode is None:
                    if (addresses := await self._addresses()) is not None:
                        return addresses
                    await asyncio.sleep(POLL_S)  # a file and a port have no other notice
        except TimeoutError:
            raise Problem(
                f"{self.spec.name} did not come up within {self.spec.ready_s:g} s", self._log_hint()
            ) from None
        raise Problem(f"{self.spec.name} ended with status {self.returncode}", self._log_hint())

    async def _addresses(self) -> dict[str, str] | None:
        if self.spec.ready_file is not None:
            if not self.spec.ready_file.exists():
                return None
            return {str(k): str(v) for k, v in json.loads(self.spec.ready_file.read_text()).items()}
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.spec.ready_port)
        except OSError:
            return None
        writer.close()
        return {}

    def _log_hint(self) -> str:
        tail = self.spec.log.read_text(errors="replace").strip().splitlines()[-5:]
        return "\n".join([f"see {self.spec.log}; its last lines:", *tail])

    async def stop(self) -> None:
        """Asks the child to end, and insists after a while."""
        if self.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

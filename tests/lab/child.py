"""A process of the platform on a host of the lab: start, readiness, kill, restart, stop."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.host import Host

_START_S = 120.0
_STOP_S = 20.0
_POLL_S = 0.02  # there is nothing to wait on for a file and a port
_PATH = f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin:/usr/local/bin:/usr/local/sbin"


@dataclass(slots=True)
class Child:
    """``command`` on ``host``, with its output in ``folder``/NAME.log.

    Our services are ready once they have written their ready file, other programs once they listen on ``ready_port``.
    """

    name: str
    host: Host
    command: Sequence[str]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready_port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def is_service(self) -> bool:
        return not self.ready_port

    @property
    def pid(self) -> int:
        """Pid of the current or last process."""
        assert self._process is not None
        return self._process.pid

    @property
    def _ready_file(self) -> Path:
        return self.folder / f"{self.name}.ready.json"

    def start(self) -> None:
        program = shutil.which(self.command[0], path=_PATH)
        if program is None:
            raise AssertionError(f"{self.command[0]} is not installed: run `make developer`")
        self._ready_file.unlink(missing_ok=True)
        env = {"TORCHRELAY_READY_FILE": str(self._ready_file), **self.env}
        with self.log.open("ab") as log:
            self._process = self.host.spawn([program, *self.command[1:]], env=env, stdout=log, stderr=log)

    def await_ready(self) -> None:
        """Waits until it serves. Raises AssertionError with the end of its log when it does not."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while not (self._ready_file.exists() if self.is_service else self._listens()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not come up:\n{self.log.read_text()[-2000:]}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(_STOP_S)

    def ask_to_end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def await_end(self) -> int:
        """Stops it and returns its status; kills it after a timeout."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(_STOP_S)

    def said(self, event: str) -> list[dict[str, Any]]:
        """The lines of its log about ``event``, oldest first."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [entry for entry in map(json.loads, lines) if entry.get("event") == event]

    def _listens(self) -> bool:
        with self.host.inside(), socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((self.host.address, self.ready_port)) == 0


def start_waves(waves: Sequence[Sequence[Child]]) -> None:
    """Starts each wave once the one before it serves."""
    for wave in waves:
        for child in wave:
            child.start()
        for child in wave:
            child.await_ready()


def end_waves(waves: Sequence[Sequence[Child]]) -> dict[str, int]:
    """Ends each wave after those that were started later; returns the statuses by name."""
    statuses: dict[str, int] = {}
    for wave in reversed(waves):
        for child in wave:
            child.ask_to_end()
        statuses |= {child.name: child.await_end() for child in wave}
    return statuses


def unix_proxy(host: Host, folder: Path, addresses: Mapping[str, str]) -> Child:
    """Sockets ``folder``/NAME.sock for addresses inside a lab: see unix_proxy.py."""
    program = str(Path(__file__).with_name("unix_proxy.py"))
    joined = [f"{folder / name}.sock={address}" for name, address in addresses.items()]
    return Child("proxy", host, ["python", program, *joined], folder)

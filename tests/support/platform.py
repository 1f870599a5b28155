"""The whole platform as a person starts it: `torchrelay up` on a fresh home, for end-to-end tests and benches."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from tests.support.scheduler import watch
from tests.support.wait import HANG_S
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.cli.home import Home
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller
from torchrelay.common.identity.tls import Tls, TlsFiles
from torchrelay.common.net.rpc.channels import open_blocking_channel
from torchrelay.control.v1 import scheduler_pb2

START_S = 90
SCRIPTS = Path(sys.executable).parent
TLS_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file")
BROKERS = {"redis": "valkey-server", "nats": "nats-server"}


@dataclass(frozen=True, slots=True)
class Platform:
    """A running install: its home, its endpoints and its `up` process."""

    home: Home
    endpoints: dict[str, str]
    process: subprocess.Popen[bytes]

    @property
    def http(self) -> str:
        return self.endpoints["http"]

    def admin(self) -> GatewayClient:
        return GatewayClient(self.http, self.home.admin_key())

    def tenant(self, name: str, **settings: Any) -> str:
        """Makes a tenant and returns a key of it."""
        with self.admin() as admin:
            admin.call("POST", "/v1/tenants", json={"name": name, **settings})
            key: str = admin.call("POST", "/v1/keys", json={"tenant": name, "name": "test"})["key"]
            return key

    def upload(self, key: str, folder: Path, name: str, **settings: Any) -> str:
        """Publishes a model folder and returns the model's full name."""
        with GatewayClient(self.http, key) as client:
            model: str = ModelUpload(client, Folder(folder), name, lambda *_: None).run(settings)["id"]
            return model

    def cli(self, *words: str) -> str:
        """The standard output of a command of `torchrelay` that ends well."""
        command = [str(SCRIPTS / "torchrelay"), *words, "--home", str(self.home.path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def pid(self, child: str) -> int:
        """The process of one child, by its name in `up`: redis, nats, gateway, scheduler, prefill-0, ...

        Raises ``FileNotFoundError`` while it does not run.
        """
        if child in BROKERS:
            return self._pid_of_program(BROKERS[child])
        pid: int = json.loads((self.home.run / f"{child}.json").read_text())["pid"]
        return pid

    def _pid_of_program(self, program: str) -> int:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                name = (path / "comm").read_text().strip()
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name == program and parent == self.process.pid:
                return int(path.name)
        raise FileNotFoundError(program)

    def serves(self, child: str, other_than: int) -> bool:
        """Whether the child runs as another process than this one, and answers."""
        try:
            if self.pid(child) == other_than:
                return False
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return child not in BROKERS or _accepts(self.endpoints[child])

    def kill(self, child: str) -> int:
        """kill -9; `up` starts the child again. Returns the pid that was killed."""
        pid = self.pid(child)
        os.kill(pid, signal.SIGKILL)
        return pid

    def await_restart(self, child: str, old_pid: int) -> None:
        """Until the child serves again in a new process."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.serves(child, other_than=old_pid):
                return
            time.sleep(0.05)
        raise AssertionError(f"{child} did not come back within {START_S} s; see {self.home.logs / child}.log")

    def incarnations(self) -> set[str]:
        """Incarnations of the workers and stores that the scheduler knows."""
        view = next(self.views())
        return {peer.incarnation for peers in (view.workers, view.stores) for peer in peers}

    def await_new_slots(self, before: set[str]) -> None:
        """Until the scheduler knows a worker and a store other than those of ``before``, so that it can load models."""
        deadline = time.monotonic() + START_S
        for view in self.views():
            if all(any(peer.incarnation not in before for peer in peers) for peers in (view.workers, view.stores)):
                return
            assert time.monotonic() < deadline, f"no new worker and store: {view.workers}, {view.stores}"

    def views(self) -> Iterator[scheduler_pb2.ClusterView]:
        """The scheduler's view, at once and after every change."""
        files = [Path(self.endpoints[name]) for name in TLS_FILES if name in self.endpoints]
        tls = Tls(TlsFiles(*files)) if files else None
        return watch(self.endpoints["scheduler"], tls, self.home.call_token(SCHEDULER_NODE, Caller.CLI))

    @contextmanager
    def channel(self, address: str, node_id: str) -> Iterator[grpc.Channel]:
        """A channel to a node of a platform without TLS, on which every call may be made."""
        with open_blocking_channel(address, token=self.home.call_token(node_id, *Caller)) as channel:
            yield channel

    def await_zero(self, timeout_s: float = HANG_S) -> scheduler_pb2.ClusterView:
        """Until no worker holds a model."""
        deadline = time.monotonic() + timeout_s
        for view in self.views():
            if not view.instances:
                return view
            assert time.monotonic() < deadline, f"instances are still there: {view.instances}"
        raise AssertionError("the scheduler ended its view")

    def spans(self) -> list[dict[str, Any]]:
        """The finished spans of all services so far; a line that is being written is not whole."""
        return [json.loads(line) for line in self.home.traces.read_text().rpartition("\n")[0].splitlines()]


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 0), 1):
            return True
    except OSError:
        return False


@contextmanager
def running_platform(
    folder: Path, options: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[Platform]:
    """Starts `torchrelay up` on ``folder`` with the given flags; stops it with SIGINT, and checks that it ends well."""
    home = Home(folder)
    command = [str(SCRIPTS / "torchrelay"), "up", "--home", str(folder), *options]
    log = folder / "up.log"
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(env or {})})
    try:
        _await_up(home, process, log)
        yield Platform(home, home.endpoints(), process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert status == 0, f"torchrelay up ended with {status}:\n{log.read_text()[-3000:]}"


def _await_up(home: Home, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not home.endpoints_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"torchrelay up did not come up:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)

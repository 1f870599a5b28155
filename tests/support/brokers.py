"""Real Valkey and nats-server processes for tests, each on a free loopback port with data in a given folder."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.wait import wait_until
from torchrelay.cli.up.broker_programs import nats_program, redis_program
from torchrelay.common.process.parent_death import tied_to_this_process


def free_port() -> int:
    """A loopback port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_ports(count: int) -> list[int]:
    """Different loopback ports that are free at the moment."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def free_port_range(count: int, lowest: int = 10_000) -> int:
    """The first of successive loopback ports that are free, below those that the kernel gives to connections."""
    for begin in random.sample(range(lowest, 32_000, count), 100):
        with ExitStack() as stack, suppress(OSError):
            for port in range(begin, begin + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return begin
    raise AssertionError("no free ports")


class EndedEarly(RuntimeError):
    """The server ended before it listened, usually because its port was taken meanwhile."""


@contextmanager
def running(
    command: Sequence[str], log: Path, port: int, host: str = "127.0.0.1", limit_s: float = 20.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server until the block or this thread ends; enters once it accepts connections, within ``limit_s``.

    Raises ``EndedEarly``.
    """
    program, *arguments = command
    tied = tied_to_this_process([shutil.which(program) or program, *arguments])
    with log.open("wb") as output:
        process = subprocess.Popen(tied, stdout=output, stderr=subprocess.STDOUT)
    try:
        _await_port(process, host, port, log, limit_s)
        yield process
    finally:
        end(process)


@contextmanager
def listening(command: Callable[[int], Sequence[str]], log: Path, host: str, port: int = 0) -> Iterator[int]:
    """Like ``running``, on ``port`` or any free one, with another choice if it was taken meanwhile."""
    with ExitStack() as stack:
        for tries_left in (2, 1, 0):
            chosen = port or free_port()
            try:
                stack.enter_context(running(command(chosen), log, chosen, host))
                break
            except EndedEarly:
                if not tries_left:
                    raise
        yield chosen


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and after 10 s kill -9."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_port(process: subprocess.Popen[bytes], host: str, port: int, log: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EndedEarly(f"{process.args!r} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        try:
            with socket.create_connection((host, port), timeout=1):
                return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} did not listen on port {port} within {limit_s:g} s")


@contextmanager
def redis_server(folder: Path, users: str = "") -> Iterator[str]:
    """The URL of a fresh Redis without persistence. ``users``: lines of its configuration; empty: everybody may all."""
    program = redis_program()
    settings = folder / "redis.conf"
    settings.write_text(users)

    def command(port: int) -> list[str]:
        place = [str(settings), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return [program, *place, "--save", "", "--appendonly", "no"]

    with listening(command, folder / "redis.log", "127.0.0.1") as port:
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def nats_server(folder: Path, port: int = 0, host: str = "127.0.0.1", authorization: str = "") -> Iterator[str]:
    """The URL of a fresh NATS server with JetStream on file storage.

    ``authorization``: a block of its configuration; empty: everybody may all.
    """
    program = nats_program()
    # Every stream reserves its largest size, and tests make dozens: the default limit is what the disk has free.
    settings = folder / "nats.conf"
    settings.write_text(f'jetstream {{ store_dir: "{folder / "jetstream"}", max_file_store: 1TB }}\n{authorization}')

    def command(port: int) -> list[str]:
        return [program, "-c", str(settings), "-a", host, "-p", str(port)]

    with listening(command, folder / "nats.log", host, port) as chosen:
        yield f"nats://{host}:{chosen}"


@dataclass(slots=True)
class NatsCluster:
    """NATS servers with JetStream that form a cluster, by name."""

    urls: dict[str, str]
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()


@contextmanager
def nats_cluster(folder: Path, authorization: str = "", num_servers: int = 3) -> Iterator[NatsCluster]:
    """A fresh cluster, whose servers know each other. ``authorization``: as for ``nats_server``."""
    program = nats_program()
    names = [f"nats-{number}" for number in range(num_servers)]
    with ExitStack() as stack:
        ports = free_ports(3 * num_servers)
        clients, routes, monitors = (dict(zip(names, ports[kind::3], strict=True)) for kind in range(3))
        cluster = NatsCluster({name: f"nats://127.0.0.1:{port}" for name, port in clients.items()})
        peers = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes.values())
        for name in names:
            settings = folder / f"{name}.conf"
            settings.write_text(
                f'server_name: {name}\nhttp: "127.0.0.1:{monitors[name]}"\n'
                f'jetstream {{ store_dir: "{folder / name}", max_file_store: 1TB }}\n'
                f'cluster {{ name: test, listen: "127.0.0.1:{routes[name]}", routes: [{peers}] }}\n{authorization}'
            )
            command = [program, "-c", str(settings), "-a", "127.0.0.1", "-p", str(clients[name])]
            server = running(command, folder / f"{name}.log", clients[name])
            cluster._processes[name] = stack.enter_context(server)
        wait_until(
            lambda: any(_num_current_peers(port) == num_servers - 1 for port in monitors.values()), "the cluster"
        )
        yield cluster


def _num_current_peers(monitor: int) -> int:
    """Servers that follow this one, if it is the leader of the cluster's JetStream."""
    jetstream = httpx.get(f"http://127.0.0.1:{monitor}/jsz", trust_env=False).json()
    return sum(peer["current"] for peer in jetstream["meta_cluster"].get("replicas", []))

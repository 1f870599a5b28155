"""A cluster of Ray on this host: a head without slots, and two raylets with a slot each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.fleet.machines import kill_all, variables_of
from tests.support.brokers import free_port_range
from tests.support.wait import wait_until
from torchrelay.cli.launchers.ray_jobs import RESOURCE

MACHINES = ("r1", "r2")
MACHINE, CLUSTER = "FLEET_MACHINE", "FLEET_CLUSTER"  # variables of all processes of a machine
NUM_TRIES = 2
RAY = (sys.executable, "-m", "tests.fleet.patient_ray")


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A running Ray."""

    address: str
    engine: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {}

    def machine_of(self, worker_id: str) -> str:
        return variables_of(worker_id)[MACHINE]

    def kill(self, machine: str) -> None:
        kill_all(f"{MACHINE}={machine}", f"{CLUSTER}={self.folder}")


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Kills all its processes at the end. ``folder``: on a short path, for Ray's sockets."""
    # Below the ports of connections, since Ray binds them seconds later, and above those of its workers.
    port = free_port_range(2, lowest=20_000)
    client_port = port + 1
    with ExitStack() as stack:
        stack.callback(kill_all, f"{CLUSTER}={folder}")

        def start(name: str, *options: str) -> None:
            """Nodes that start at the same time on a host choose the same ports, so each waits for the one before."""
            log = stack.enter_context((folder / f"{name}.out").open("wb"))
            command = [*RAY, "start", "--block", "--disable-usage-stats", *options]
            environment = {**os.environ, MACHINE: name, CLUSTER: str(folder)}

            def runs() -> bool:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                stack.callback(process.wait)
                stack.callback(process.kill)
                _run_first(process.pid)
                has_begun = False

                def has_ended_or_begun() -> bool:
                    nonlocal has_begun
                    has_begun = "block forever" in Path(log.name).read_text()
                    return has_begun or process.poll() is not None

                wait_until(has_ended_or_begun, f"Ray's {name}", limit_s=240.0)
                if not has_begun:
                    kill_all(f"{MACHINE}={name}", f"{CLUSTER}={folder}")
                return has_begun

            assert any(runs() for _ in range(NUM_TRIES)), Path(log.name).read_text()

        start(
            "head", "--head", "--num-cpus=0", f"--port={port}", f"--ray-client-server-port={client_port}",
            "--include-dashboard=false", f"--temp-dir={folder / 'ray'}", "--node-ip-address=127.0.0.1",
        )  # fmt: skip
        slots = json.dumps({RESOURCE: 1})
        for name in MACHINES:
            start(
                name,
                "--num-cpus=1",
                f"--address=127.0.0.1:{port}",
                "--node-ip-address=127.0.0.1",
                f"--resources={slots}",
            )
        yield RayCluster(f"127.0.0.1:{port}", f"ray://127.0.0.1:{client_port}", folder)


def _run_first(pid: int) -> None:
    """Gives a session more of a busy machine's CPU than other sessions, where the kernel shares it among them."""
    with suppress(OSError):  # without root, or without such shares
        Path(f"/proc/{pid}/autogroup").write_text("-10")

"""A cluster of Slurm on this host: munged, slurmctld and two slurmd, each with its own port and folder.

Debian builds Slurm for several slurmd on a host. It needs root, since slurmd starts jobs for their users.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fleet.machines import kill_all, variables_of
from tests.support.wait import wait_until

NODES = ("n1", "n2")
_SETTINGS = """
ClusterName=torchrelay
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[slurmctld]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=20
SchedulerParameters=sched_interval=1,batch_sched_delay=0
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"
_PARTITION = "PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP"


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A running Slurm; `sbatch` reaches it with its environment."""

    folder: Path
    daemons: Mapping[str, subprocess.Popen[bytes]]

    @property
    def engine(self) -> str:
        return "slurm"

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def jobs(self) -> list[str]:
        """The ids of jobs that wait or run."""
        states = "PENDING,CONFIGURING,RUNNING,SUSPENDED"  # not those whose machine died while they ended
        return self.output("squeue", "--noheader", "--states", states, "--format", "%i").split()

    def machine_of(self, worker_id: str) -> str:
        return variables_of(worker_id)["SLURMD_NODENAME"]

    def output(self, *command: str) -> str:
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True).stdout

    def kill(self, machine: str) -> None:
        self.daemons[machine].kill()
        kill_all(f"SLURM_CONF={self.folder}/slurm.conf", f"SLURMD_NODENAME={machine}")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Stops all its processes at the end. ``folder``: on a short path, for munge's socket."""
    ports = {name: _free_port() for name in ("slurmctld", *NODES)}
    for name in ("munge", "state", *(f"{node}/spool" for node in NODES)):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    nodes = [_NODE.format(name=name, host=host, port=ports[name]) for name in NODES]
    settings = _SETTINGS.format(host=host, ports=ports, folder=folder)
    partition = _PARTITION.format(names=",".join(NODES))
    (folder / "slurm.conf").write_text("\n".join((settings, *nodes, partition, "")))
    with ExitStack() as stack:
        daemons: dict[str, subprocess.Popen[bytes]] = {}
        cluster = SlurmCluster(folder, daemons)

        def start(name: str, *command: str) -> None:
            log = stack.enter_context((folder / f"{name}.out").open("wb"))
            environment = {**os.environ, **cluster.environment}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            daemons[name] = process
            stack.callback(process.wait)
            stack.callback(process.terminate)

        stack.callback(kill_all, f"SLURM_CONF={folder}/slurm.conf")  # jobs leave the sessions of their slurmd
        _start_munge(folder / "munge", start)
        start("slurmctld", _program("slurmctld"), "-D")
        for node in NODES:
            start(node, _program("slurmd"), "-D", "-N", node)
        wait_until(lambda: cluster.output("sinfo", "--noheader", "--format", "%t %D").split() == ["idle", "2"], "Slurm")
        yield cluster


def _start_munge(folder: Path, start: Callable[..., None]) -> None:
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    start("munged", _program("munged"), "--foreground", "--force", *options)
    wait_until((folder / "socket").exists, "munged")


def _program(name: str) -> str:
    path = shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin")
    assert path is not None, f"{name} is not installed: make test-servers"
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port

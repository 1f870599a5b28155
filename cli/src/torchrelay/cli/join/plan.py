"""The store and the workers of a machine that joins: their ids and their settings."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from torchrelay.cli.errors import CliError
from torchrelay.cli.join.folder import NodeFolder, make_private
from torchrelay.cli.join_file import JoinFile
from torchrelay.cli.up.children.child import ChildSpec
from torchrelay.cli.up.plan import with_engines_start
from torchrelay.common.host.addresses import family_of, join_address, split_address
from torchrelay.common.host.gpus import gpu_settings
from torchrelay.common.host.machine import SHARED_MEMORY, shared_digest
from torchrelay.common.process.environment import service_environment
from torchrelay.common.process.settings import NODE_ID, PREFIX, ServiceSettings
from torchrelay.control.v1 import scheduler_pb2

SHUTDOWN_S = 12.0  # for the shutdown after the grace; then the kernel would end the service
_MAX_HOST_CHARS = 40
_OF_ONE_SERVICE = ("advertise_host", "data_port", "metrics_port", "port")


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Nodes of this machine. Sizes of 0 and empty names are chosen automatically."""

    num_workers: int = 1
    worker_id: str = ""  # of the only worker
    host_id: str = ""
    advertise_host: str = ""
    home: Path | None = None
    device: str = "auto"
    gpus: tuple[str, ...] = ()  # that the workers may use; none if they compute on the CPU
    threads: int = 0
    labels: tuple[str, ...] = ()  # of this host, as its workers report them; none: those of the environment
    arena_bytes: int = 0
    kv_pool_bytes: int = 0


class NodePlan:
    """The ids of this machine's nodes, and the children that run them. Raises ``CliError`` for ids beyond the scope."""

    def __init__(self, cluster: JoinFile, options: JoinOptions, settings: ServiceSettings) -> None:
        self._cluster, self._options, self._tls = cluster, options, settings.tls
        self.host_id = self._checked(options.host_id or cluster.scope + self._host_name(), "--host-id")
        if "_" in self.host_id.removeprefix(cluster.scope):
            raise CliError(f"{self.host_id!r} has an underscore", "choose a --host-id without; it separates workers")
        names = (
            [options.worker_id] if options.worker_id else [f"{self.host_id}_{i}" for i in range(options.num_workers)]
        )
        self.worker_ids = [self._checked(name, "--worker-id") for name in names]
        self._cluster_digest = hashlib.sha256(cluster.scheduler.encode()).hexdigest()[:8]
        self._host = options.advertise_host or _own_address(cluster.scheduler)
        self._grace_s = settings.grace_s
        self._port: int | None = None

    def _checked(self, node_id: str, option: str) -> str:
        if re.fullmatch(NODE_ID, node_id) is None:
            raise CliError(
                f"{node_id!r} cannot be an id", f"choose {option} with 1 to 63 letters, digits, hyphens and underscores"
            )
        if not node_id.startswith(self._cluster.scope):
            raise CliError(
                f"{node_id!r} is beyond the scope of the join file", f"begin {option} with {self._cluster.scope}"
            )
        return node_id

    def _host_name(self) -> str:
        """The name of the machine, in a job of Slurm that of its node, with a digest of what its programs share."""
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        home = self._options.home
        folder = Path(tempfile.gettempdir()) if home is None else make_private(home)
        digest = shared_digest(SHARED_MEMORY, folder)
        return f"{re.sub('[^A-Za-z0-9-]', '-', name)[:_MAX_HOST_CHARS]}-{digest}"

    def folder(self) -> NodeFolder:
        """By default a folder for this user, cluster and host, which ends with the machine."""
        if self._options.home is not None:
            return NodeFolder(self._options.home)
        own = make_private(Path(tempfile.gettempdir(), f"torchrelay-{os.getuid()}"))
        return NodeFolder(make_private(own / self._cluster_digest) / self.host_id)

    def store(self, folder: NodeFolder, credentials: scheduler_pb2.EnrollReply) -> ChildSpec:
        env = {
            "TORCHRELAY_STORE_ID": self.host_id,
            "TORCHRELAY_PORT": str(self._store_port(folder)),
            "TORCHRELAY_DATA_DIR": str(folder.store),
            "TORCHRELAY_REMOTE_URL": self._remote_url(folder),
            "TORCHRELAY_ARENA_PATH": str(SHARED_MEMORY / f"torchrelay-{self.host_id}-{self._cluster_digest}"),
        }
        if self._options.arena_bytes:
            env["TORCHRELAY_ARENA_BYTES"] = str(self._options.arena_bytes)
        elif self._options.gpus:
            env["TORCHRELAY_ARENA_LIMIT_BYTES"] = "0"
        return self._service(folder, "param-store", "torchrelay-param-store", credentials, env)

    def _store_port(self, folder: NodeFolder) -> int:
        """Returns the same port for the store and for its workers."""
        if self._port is None:
            self._port = folder.choose_store_port(self._host, self.worker_ids)
        return self._port

    def _remote_url(self, folder: NodeFolder) -> str:
        """The cluster's; if that is a folder of another machine, a folder of this machine, which stays empty."""
        url = self._cluster.remote_url
        is_elsewhere = url.startswith("file://") and not Path(unquote(url.removeprefix("file://"))).is_dir()
        return folder.remote.as_uri() if is_elsewhere else url

    def workers(self, folder: NodeFolder, credentials: Sequence[scheduler_pb2.EnrollReply]) -> list[ChildSpec]:
        return [self._worker(folder, number, own) for number, own in enumerate(credentials)]

    def _worker(self, folder: NodeFolder, number: int, credentials: scheduler_pb2.EnrollReply) -> ChildSpec:
        worker_id = self.worker_ids[number]
        env = {
            "TORCHRELAY_WORKER_ID": worker_id,
            "TORCHRELAY_STORE_ADDRESS": join_address(self._host, self._store_port(folder)),
            "TORCHRELAY_STORE_TOKEN": credentials.store_token,
            "TORCHRELAY_COMPILED_KEY": credentials.compiled_key,
            **gpu_settings(self._options.device, self._options.gpus, number),
            "TORCHRELAY_THREADS": str(self._options.threads),
            "TORCHRELAY_CORES_FILE": str(folder.run / "core-shares"),
        }
        if self._options.labels:
            env["TORCHRELAY_LABELS"] = ",".join(self._options.labels)
        if self._options.kv_pool_bytes:
            env["TORCHRELAY_KV_POOL_BYTES"] = str(self._options.kv_pool_bytes)
        return with_engines_start(self._service(folder, worker_id, "torchrelay-worker", credentials, env))

    def _service(
        self, folder: NodeFolder, name: str, program: str, credentials: scheduler_pb2.EnrollReply, env: dict[str, str]
    ) -> ChildSpec:
        ready_file = folder.run / f"{name}.json"
        common = {
            "TORCHRELAY_HOST": self._host,
            "TORCHRELAY_HOST_ID": self.host_id,
            "TORCHRELAY_NODE_KEY": credentials.node_key,
            "TORCHRELAY_NATS_URL": self._cluster.nats_url,
            "TORCHRELAY_READY_FILE": str(ready_file),
            "TORCHRELAY_GRACE_S": str(self._grace_s),
        }
        inherited = service_environment(os.environ, reads_object_store=name == "param-store")
        for setting in _OF_ONE_SERVICE:  # store and workers would all have them
            inherited.pop(f"{PREFIX}{setting.upper()}", None)
        script = str(Path(sys.executable).parent / program)
        return ChildSpec(
            name,
            (script,),
            folder.logs / f"{name}.log",
            {**common, **env},
            ready_file,
            stop_s=self._grace_s + SHUTDOWN_S,
            tls=self._tls,
            inherited=inherited,
        )


def _own_address(scheduler: str) -> str:
    """The address of this machine from which the scheduler is reached. Raises ``CliError``."""
    try:
        host, port = split_address(scheduler)
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            address: str = probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise CliError(f"the scheduler's address {scheduler} cannot be used: {error}", "see the join file") from error
    return address

"""Plans the children of an embedded install: brokers and services, each with its settings as environment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote

from torchrelay.cli.environment import environment_settings
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.join_file import JoinFile
from torchrelay.cli.launchers.launcher import Launcher
from torchrelay.cli.launchers.pool_driver import PoolDriver
from torchrelay.cli.up.broker_programs import nats_program, redis_program
from torchrelay.cli.up.children.child import GRACE_S, STOP_TIMEOUT_S, ChildSpec
from torchrelay.cli.up.children.stack import Stack
from torchrelay.cli.up.disk import folder_bytes
from torchrelay.cli.up.ports import PREFERRED_HTTP_PORT, Ports
from torchrelay.cli.up.remote_store import remote_url
from torchrelay.cli.up.stream_sizes import stream_sizes
from torchrelay.common.host.addresses import REACHED_AT, join_address
from torchrelay.common.host.disk import free_bytes
from torchrelay.common.host.gpus import gpu_settings
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller
from torchrelay.common.identity.join_token import join_token
from torchrelay.common.identity.keys import broker_password, derive_compiled_key, derive_node_key, framed_mac
from torchrelay.common.identity.tls import Tls, TlsFiles
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.net.nats_permissions import (
    GATEWAY_USER,
    NODES_USER,
    SCHEDULER_USER,
    NatsUser,
    authorization,
    gateway_user,
    nodes_user,
    scheduler_user,
    store_user,
    worker_user,
)
from torchrelay.common.net.redis_users import redis_users
from torchrelay.common.net.urls import with_credentials, without_password
from torchrelay.common.process.environment import service_environment

HOST_ID = "local"
STORE_ID = "store-local"
OWN_CERTIFICATE = "cli"  # the name of the certificate of `up` itself
LOOPBACK = "127.0.0.1"
NODE_SCOPE = "node-"  # the ids of nodes that join begin with it, so none is a node of `up`
_SCHEDULER_PORT, _STORE_PORT, _NATS_PORT = 7101, 7103, 4222
OWN_ENGINE = "torchrelay"
JOIN_TOKEN_LIFE_S = 365 * 86400
_OTHER_ENGINE_READY_S = 180.0  # to import vLLM takes half a minute on an idle machine


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Counts, sizes and ports of an embedded install; 0 means chosen automatically."""

    host: str = "127.0.0.1"  # where the public API listens
    cluster_host: str = ""  # where the services listen, for machines that join; empty: on loopback, and none may join
    http_port: int = 0
    grpc_port: int = 0
    num_prefill_workers: int = 1
    num_decode_workers: int = 1
    num_both_workers: int = 0
    remote: str = ""  # a folder or a URL; empty: in the home
    arena_bytes: int = 0
    kv_pool_bytes: int = 0
    idle_timeout_s: float = 0.0
    threads: int = 0
    labels: tuple[str, ...] = ()  # of this host, as its workers report them; none: those of the environment
    device: str = "cpu"
    num_devices: int = 1  # of each worker, from ``device`` on
    gpus: tuple[str, ...] = ()  # that the workers here may use; none if they compute on the CPU
    log_level: str = "info"
    least_workers: int | None = None  # the others start when they are needed; None: all start with `up`
    pool_mode: str = ""  # empty: as the settings file says
    scaling: str = ""  # the same
    on: str = ""  # where elastic workers run: kubernetes, slurm, ray or ray://HOST:PORT; empty: here
    pod: Path | None = None  # of kubernetes: the manifest of a worker's pod
    num_remote_workers: int = 0  # at most, on the machines of ``on``
    tls: bool = False  # between the services, not for the public API

    @property
    def services_host(self) -> str:
        """Where services and broker listen for each other."""
        return self.cluster_host or LOOPBACK


def _port_from_environment(name: str) -> int:
    """0 when it is not set. Raises ``CliError`` when it is not a valid port."""
    value = os.environ.get(name, "0")
    if not value.isdecimal() or int(value) > 65535:
        raise CliError(f"{name} is {value!r}, which is not a valid port", "use a number from 1 to 65535, or unset it")
    return int(value)


def worker_engine() -> str:
    """The engine of the workers, which inherit the variable."""
    return os.environ.get("TORCHRELAY_ENGINE", OWN_ENGINE)


def with_engines_start(spec: ChildSpec) -> ChildSpec:
    """The worker with the time in which its engine starts."""
    return spec if worker_engine() == OWN_ENGINE else replace(spec, ready_s=_OTHER_ENGINE_READY_S)


def worker_roles(options: UpOptions) -> list[tuple[str, str]]:
    """The workers' names, each with its roles."""
    counts = (
        # Every worker can play both roles; its own comes first. When the others are gone or busy, the scheduler
        # changes its role without moving the weights.
        ("prefill", "prefill,decode", options.num_prefill_workers),
        ("decode", "decode,prefill", options.num_decode_workers),
        ("worker", "prefill,decode", options.num_both_workers),
    )
    return [(f"{name}-{i}", roles) for name, roles, count in counts for i in range(count)]


def callers_of(options: UpOptions) -> dict[str, Caller]:
    """The caller that each child is to the services that it calls; also for the commands."""
    services = {"param-store": Caller.STORE, "scheduler": Caller.SCHEDULER, "gateway": Caller.GATEWAY}
    return {**services, **{name: Caller.WORKER for name, _ in worker_roles(options)}, OWN_CERTIFICATE: Caller.CLI}


class StackPlan:
    """Chooses ports, keys and environments for one home. ``tls``: each child's files for TLS between the services.

    ``arena``: the arena's file.
    """

    def __init__(self, home: Home, options: UpOptions, ports: Ports, tls: Mapping[str, TlsFiles] | None = None) -> None:
        self._home, self._options, self._ports = home, options, ports
        self._tls_files = tls or {}
        self._tls = Tls(self._tls_files[OWN_CERTIFICATE]) if self._tls_files else None
        self._cluster_key = bytes.fromhex(home.cluster_key())
        self._redis_url = os.environ.get("TORCHRELAY_REDIS_URL", "")
        self._nats_url = os.environ.get("TORCHRELAY_NATS_URL", "")
        self._is_nats_embedded = not self._nats_url
        self._metrics_port = _port_from_environment("TORCHRELAY_METRICS_PORT")
        self._subjects = Subjects(environment_settings().nats_prefix)
        self._scheduler_port = self._service_port(_SCHEDULER_PORT)
        self._store_port = self._service_port(_STORE_PORT)
        host = options.host
        self._http_port, self._taken_http_port = self._choose_http_port()
        self._grpc_port = (
            ports.exactly(host, options.grpc_port, "--grpc-port") if options.grpc_port else ports.free(host)
        )
        shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else home.run
        # A hash: the name is there for everybody to read.
        self.arena = shared_memory / f"torchrelay-{framed_mac(self._cluster_key, b'torchrelay arena')[:6].hex()}"

    def stack(self) -> Stack:
        """Raises ``CliError`` when a broker is not installed."""
        brokers = tuple(spec for spec in (self._redis(), self._nats()) if spec is not None)
        groups = (brokers, (self._store(),), (self._scheduler(),), tuple(self._workers()), (self._gateway(),))
        host = REACHED_AT.get(self._options.host, self._options.host)
        endpoints = {
            "http": f"http://{join_address(host, self._http_port)}",
            "grpc": join_address(host, self._grpc_port),
            "scheduler": self._scheduler_address,
            "store": self._store_address,
            "nats": without_password(self._nats_url),
            "redis": without_password(self._redis_url),
            **self._tls_settings(OWN_CERTIFICATE),  # for tools that ask the scheduler themselves
        }
        home = self._home
        return Stack(
            groups, endpoints, home.path, home.traces, self.arena, self._http_port, self._taken_http_port, self._elastic
        )

    @property
    def _scheduler_address(self) -> str:
        return join_address(self._options.services_host, self._scheduler_port)

    @property
    def _store_address(self) -> str:
        return join_address(self._options.services_host, self._store_port)

    @property
    def _remote_url(self) -> str:
        return remote_url(self._options.remote, self._home.path / "remote")

    @property
    def jobs_name(self) -> str:
        """The name of this platform's jobs on another engine, the same in each run."""
        return f"torchrelay-{framed_mac(self._cluster_key, b'torchrelay jobs')[:6].hex()}"

    def join_file(self, scope: str = NODE_SCOPE) -> JoinFile:
        """Returns the join file, once ``stack`` has been called. ``scope``: the beginning of joining nodes' ids."""
        expires = int(time.time()) + JOIN_TOKEN_LIFE_S
        token = join_token(self._cluster_key, scope, expires)
        return JoinFile(self._scheduler_address, self._nats_url_of(NODES_USER), self._remote_url, token)

    def _service_port(self, preferred: int) -> int:
        """Any free port; for machines that join the preferred one, if it is free, as their join files name it."""
        return self._ports.free(self._options.services_host, [preferred] if self._options.cluster_host else [])

    def _choose_http_port(self) -> tuple[int, int]:
        """The REST port, and the preferred one if it was taken (else 0): a home keeps its port when it can."""
        host, asked, last = self._options.host, self._options.http_port, self._home.last_http_port()
        if asked:
            return self._ports.exactly(host, asked, "--http-port"), 0
        preferred = [last, PREFERRED_HTTP_PORT] if last else [PREFERRED_HTTP_PORT]
        port = self._ports.free(host, preferred)
        return port, 0 if port == preferred[0] else preferred[0]

    def _redis(self) -> ChildSpec | None:
        if self._redis_url:
            return None
        port, folder = self._ports.free(), self._home.path / "redis"
        folder.mkdir(exist_ok=True)
        user, password = GATEWAY_USER, broker_password(self._cluster_key, "redis", GATEWAY_USER)
        self._redis_url = f"redis://{user}:{password}@{LOOPBACK}:{port}/0"
        settings = self._home.write_private("redis.conf", redis_users(user, password))
        command = (
            redis_program(),
            str(settings),
            "--port",
            str(port),
            "--bind",
            LOOPBACK,
            "--dir",
            str(folder),
        )
        options = ("--save", "", "--appendonly", "no", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
        return ChildSpec(
            "redis", (*command, *options), self._home.logs / "redis.log", broker_url=self._redis_url, ready_s=20
        )

    def _nats(self) -> ChildSpec | None:
        if self._nats_url:
            return None
        host = self._options.services_host
        port, folder = self._service_port(_NATS_PORT), self._home.path / "nats"
        self._nats_url = f"nats://{join_address(host, port)}"
        settings = self._home.write_private("nats.conf", self._nats_settings(folder))
        command = (nats_program(), "-c", str(settings), "-a", host, "-p", str(port))
        url = self._nats_url_of(SCHEDULER_USER)
        return ChildSpec("nats", command, self._home.logs / "nats.log", broker_url=url, ready_s=20)

    def _nats_settings(self, folder: Path) -> str:
        # By default NATS sets aside no more than the disk has free at the moment. Ours is bounded by its streams.
        storage = f"jetstream {{ store_dir: {_nats_string(str(folder))}, max_file_store: 1TB }}"
        return f"{storage}\n{authorization(self._nats_users())}"

    def _tls_settings(self, name: str) -> dict[str, str]:
        return self._tls_files[name].as_settings() if self._tls_files else {}

    def _nats_users(self) -> list[tuple[NatsUser, str]]:
        users = [scheduler_user(self._subjects), gateway_user(self._subjects), store_user(STORE_ID, self._subjects)]
        users += [worker_user(name, self._subjects) for name, _ in worker_roles(self._options)]
        if self._options.cluster_host:
            users.append(nodes_user(self._subjects))
        return [(user, broker_password(self._cluster_key, "nats", user.name)) for user in users]

    def _nats_url_of(self, user: str) -> str:
        """The URL with the user's password, unless a variable names the server."""
        if not self._is_nats_embedded:
            return self._nats_url
        return with_credentials(self._nats_url, user, broker_password(self._cluster_key, "nats", user))

    def _service(
        self,
        name: str,
        program: str,
        env: dict[str, str],
        nats_user: str,
        node_id: str = "",
        *,
        is_public: bool = False,
    ) -> ChildSpec:
        ready_file = self._home.run / f"{name}.json"
        common = {
            "TORCHRELAY_HOST": self._options.services_host,
            "TORCHRELAY_NATS_URL": self._nats_url_of(nats_user),
            "TORCHRELAY_READY_FILE": str(ready_file),
            "TORCHRELAY_TRACE_FILE": str(self._home.traces),
            "TORCHRELAY_LOG_LEVEL": self._options.log_level,
            "TORCHRELAY_GRACE_S": os.environ.get("TORCHRELAY_GRACE_S", str(GRACE_S)),
            **{f"TORCHRELAY_{setting.upper()}": path for setting, path in self._tls_settings(name).items()},
        }
        if self._metrics_port:  # consecutive ports from the configured one on
            host = self._options.host if is_public else self._options.services_host
            port = self._ports.exactly(host, self._metrics_port, "TORCHRELAY_METRICS_PORT")
            common["TORCHRELAY_METRICS_PORT"] = str(port)
            self._metrics_port += 1
        if node_id:
            common["TORCHRELAY_NODE_KEY"] = derive_node_key(self._cluster_key, node_id).hex()
        log = self._home.logs / f"{name}.log"
        tls = None if is_public else self._tls
        script = str(Path(sys.executable).parent / program)  # console scripts are in the folder of this Python
        inherited = service_environment(os.environ, reads_object_store=node_id == STORE_ID)
        return ChildSpec(name, (script,), log, {**common, **env}, ready_file, tls=tls, inherited=inherited)

    def _store(self) -> ChildSpec:
        env = {
            "TORCHRELAY_STORE_ID": STORE_ID,
            "TORCHRELAY_HOST_ID": HOST_ID,
            "TORCHRELAY_PORT": str(self._store_port),
            "TORCHRELAY_DATA_DIR": str(self._home.path / "store"),
            "TORCHRELAY_REMOTE_URL": self._remote_url,
            "TORCHRELAY_ARENA_PATH": str(self.arena),
            "TORCHRELAY_STOP_LIMIT_S": str(int(STOP_TIMEOUT_S) - 2),
        }
        if self._options.arena_bytes:
            env["TORCHRELAY_ARENA_BYTES"] = str(self._options.arena_bytes)
        elif self._options.gpus:
            env["TORCHRELAY_ARENA_LIMIT_BYTES"] = "0"
        return self._service("param-store", "torchrelay-param-store", env, STORE_ID, STORE_ID)

    def _scheduler(self) -> ChildSpec:
        env = {"TORCHRELAY_PORT": str(self._scheduler_port), "TORCHRELAY_CLUSTER_KEY": self._cluster_key.hex()}
        if self._options.pool_mode:
            env["TORCHRELAY_POOL_MODE"] = self._options.pool_mode
        if self._options.scaling:
            env["TORCHRELAY_SCALING"] = self._options.scaling
        if self._options.least_workers is not None:
            env["TORCHRELAY_POOL_MODE"] = "follow"
            env["TORCHRELAY_POOL_MIN_SLOTS"] = str(self._options.least_workers)
            env["TORCHRELAY_POOL_MAX_SLOTS"] = str(self._options.num_both_workers + self._options.num_remote_workers)
        if self._options.idle_timeout_s:
            env["TORCHRELAY_IDLE_TIMEOUT_S"] = str(self._options.idle_timeout_s)
        if self._is_nats_embedded:
            env |= self._stream_settings()
        return self._service("scheduler", "torchrelay-scheduler", env, SCHEDULER_USER)

    def _stream_settings(self) -> dict[str, str]:
        """Stream sizes that fit the home's disk, without those that variables set."""
        num_bytes = free_bytes(self._home.path) + folder_bytes(self._home.path / "nats")
        sizes = {f"TORCHRELAY_{name.upper()}": str(size) for name, size in asdict(stream_sizes(num_bytes)).items()}
        return {name: size for name, size in sizes.items() if name not in os.environ}

    @property
    def _elastic(self) -> frozenset[str]:
        is_fixed = self._options.least_workers is None
        return frozenset() if is_fixed else frozenset(name for name, _ in worker_roles(self._options))

    def driver(self, launcher: Launcher) -> PoolDriver:
        """The driver that makes the launcher follow the scheduler's target."""
        token = self._home.call_token(SCHEDULER_NODE, Caller.CLI)
        return PoolDriver(self._scheduler_address, self._tls, token, launcher)

    def _workers(self) -> list[ChildSpec]:
        return [self._worker(number, *worker) for number, worker in enumerate(worker_roles(self._options))]

    def _worker(self, number: int, name: str, roles: str) -> ChildSpec:
        options = self._options
        env = {
            "TORCHRELAY_WORKER_ID": name,
            "TORCHRELAY_HOST_ID": HOST_ID,
            "TORCHRELAY_ROLES": roles,
            "TORCHRELAY_STORE_ADDRESS": self._store_address,
            "TORCHRELAY_STORE_TOKEN": self._home.call_token(STORE_ID, Caller.WORKER),
            "TORCHRELAY_COMPILED_KEY": derive_compiled_key(self._cluster_key).hex(),
            **gpu_settings(options.device, options.gpus, number, options.num_devices),
            "TORCHRELAY_DEVICES": str(options.num_devices),
            "TORCHRELAY_THREADS": str(options.threads),
            "TORCHRELAY_CORES_FILE": str(self._home.run / "core-shares"),
        }
        if options.labels:
            env["TORCHRELAY_LABELS"] = ",".join(options.labels)
        if options.kv_pool_bytes:
            env["TORCHRELAY_KV_POOL_BYTES"] = str(options.kv_pool_bytes)
        return with_engines_start(self._service(name, "torchrelay-worker", env, name, name))

    def _gateway(self) -> ChildSpec:
        env = {
            "TORCHRELAY_HOST": self._options.host,
            "TORCHRELAY_DATABASE_URL": os.environ.get(
                "TORCHRELAY_DATABASE_URL", f"sqlite:///{quote(str(self._home.path / 'ledger.db'))}"
            ),
            "TORCHRELAY_REDIS_URL": self._redis_url,
            "TORCHRELAY_ADMIN_KEY": self._home.admin_key(),
            "TORCHRELAY_SCHEDULER_ADDRESS": self._scheduler_address,
            "TORCHRELAY_STORE_ADDRESS": self._store_address,
            "TORCHRELAY_SCHEDULER_TOKEN": self._home.call_token(SCHEDULER_NODE, Caller.GATEWAY),
            "TORCHRELAY_STORE_TOKEN": self._home.call_token(STORE_ID, Caller.GATEWAY),
            "TORCHRELAY_HTTP_PORT": str(self._http_port),
            "TORCHRELAY_GRPC_PORT": str(self._grpc_port),
        }
        if pepper := os.environ.get("TORCHRELAY_KEY_PEPPER"):
            env["TORCHRELAY_KEY_PEPPER"] = pepper
        if self._options.idle_timeout_s:  # the gateway reports it to tenants
            env["TORCHRELAY_IDLE_TIMEOUT_S"] = str(self._options.idle_timeout_s)
        return self._service("gateway", "torchrelay-gateway", env, GATEWAY_USER, is_public=True)


def _nats_string(text: str) -> str:
    """The text as a string of nats-server's configuration, which has other escapes than JSON."""
    escapes = {'"': '\\"', "\\": "\\\\"} | {chr(code): f"\\x{code:02X}" for code in range(32)}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'

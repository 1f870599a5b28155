"""The platform on hosts of a lab: control services on one, and a param-store on each of the others.

    control    NATS, Valkey, scheduler, gateway
    source     a param-store whose remote store is where uploads go
    h1 h2 h3   a param-store with an empty remote store, and a worker of both roles

So a pack reaches h1, h2 and h3 from another host's arena or not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.child import Child, end_waves, start_waves, unix_proxy
from tests.lab.host import Host
from tests.lab.network import Lab
from tests.support.guard import shared_memory_path
from torchrelay.cli.up.broker_programs import nats_program, redis_program
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, call_token
from torchrelay.transfer.protocol.tickets import derive_node_key

TARGETS = ("h1", "h2", "h3")
HOSTS = ("control", "source", *TARGETS)
# Every namespace has its own ports.
_NATS, _REDIS, _SCHEDULER, _STORE, _HTTP = 4222, 6379, 7401, 7402, 8080
_ARENA_BYTES = 96 << 20
_KV_POOL_BYTES = 16 << 20


class Cluster:
    """Starts everything on entry, stops everything on exit, and reports what did not end well.

    ``settings``: further variables for the scheduler, without prefix. Stores are called ``store-HOST``, workers
    ``worker-HOST``.
    """

    def __init__(self, lab: Lab, folder: Path, **settings: str) -> None:
        self._folder, self.control = folder, lab["control"]
        self.cluster_key, self.admin_key = secrets.token_bytes(32), f"tra-{secrets.token_hex(32)}"
        self.http = f"http://{self.control.address}:{_HTTP}"
        self.scheduler_address = f"{self.control.address}:{_SCHEDULER}"
        self.store_addresses = {name: f"{lab[name].address}:{_STORE}" for name in ("source", *TARGETS)}
        self.arenas = {name: shared_memory_path(f"{lab.name}-{name}") for name in self.store_addresses}
        self.stores = {name: self._store(lab[name]) for name in self.store_addresses}
        scheduler = self._service("scheduler", self.control, self._scheduler_env(settings))
        workers = self._workers([lab[name] for name in TARGETS])
        gateway = self._service("gateway", self.control, self._gateway_env())
        # A wave starts when the previous one serves, and stops after the later ones.
        services = [*self.stores.values(), scheduler]
        self._waves = [[self._nats(), self._redis()], services, [*workers, gateway, self._proxy()]]

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            closing.callback(self._stop)
            start_waves(self._waves)
            closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        complaint = self._stop()
        assert error is not None or not complaint, complaint

    def _stop(self) -> str:
        """Stops everything; returns what did not end well, or an empty string."""
        statuses = end_waves(self._waves)
        # Our services end with status 0, NATS with 1.
        wrong = [child.name for wave in self._waves for child in wave if child.is_service and statuses[child.name]]
        left = [path.name for path in self.arenas.values() if path.exists()]
        for path in self.arenas.values():
            path.unlink(missing_ok=True)
        return f"{wrong} did not end well, {left} were left in shared memory: {statuses}" if wrong or left else ""

    # gRPC from outside: see unix_proxy.py

    @property
    def scheduler_target(self) -> str:
        return self.store_target("scheduler")

    def store_target(self, host: str) -> str:
        return f"unix:{self._folder / host}.sock"

    def _proxy(self) -> Child:
        return unix_proxy(self.control, self._folder, {**self.store_addresses, "scheduler": self.scheduler_address})

    # Processes

    def _service(self, name: str, host: Host, env: dict[str, str], program: str = "") -> Child:
        common = {
            "HOST": host.address,
            "NATS_URL": f"nats://{self.control.address}:{_NATS}",
            "NODE_KEY": derive_node_key(self.cluster_key, name).hex(),
        }
        variables = {f"TORCHRELAY_{key}": value for key, value in {**common, **env}.items()}
        return Child(name, host, [f"torchrelay-{program or name}"], self._folder, variables)

    def _token(self, node_id: str, caller: Caller) -> str:
        return call_token(derive_node_key(self.cluster_key, node_id), caller)

    def _nats(self) -> Child:
        command = [nats_program(), "-a", self.control.address, "-p", str(_NATS)]
        command += ["-js", "-sd", str(self._folder / "nats")]
        return Child("nats", self.control, command, self._folder, ready_port=_NATS)

    def _redis(self) -> Child:
        command = [redis_program(), "--port", str(_REDIS), "--bind", self.control.address, "--protected-mode", "no"]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "no"]
        return Child("redis", self.control, command, self._folder, ready_port=_REDIS)

    def _store(self, host: Host) -> Child:
        remote = self._folder / f"remote-{host.name}"
        env = {
            "STORE_ID": f"store-{host.name}",
            "HOST_ID": host.name,
            "PORT": str(_STORE),
            "ARENA_PATH": str(self.arenas[host.name]),
            "ARENA_BYTES": str(_ARENA_BYTES),
            "DATA_DIR": str(self._folder / f"data-{host.name}"),
            "REMOTE_URL": remote.as_uri(),
        }
        return self._service(f"store-{host.name}", host, env, "param-store")

    def _workers(self, hosts: Sequence[Host]) -> list[Child]:
        return [self._worker(host) for host in hosts]

    def _worker(self, host: Host, number: int = 0) -> Child:
        """A worker of the host; ``number`` distinguishes the further ones."""
        name = f"worker-{host.name}-{number}" if number else f"worker-{host.name}"
        env = {
            "WORKER_ID": name,
            "HOST_ID": host.name,
            "STORE_ADDRESS": self.store_addresses[host.name],
            "STORE_TOKEN": self._token(f"store-{host.name}", Caller.WORKER),
            "ROLES": "prefill,decode",
            "THREADS": "1",
            "KV_POOL_BYTES": str(_KV_POOL_BYTES),
        }
        return self._service(name, host, env, "worker")

    def _scheduler_env(self, settings: dict[str, str]) -> dict[str, str]:
        # The tests place the copies.
        alone = {"REPLICATE": "false"}
        return {"PORT": str(_SCHEDULER), "CLUSTER_KEY": self.cluster_key.hex(), **alone, **settings}

    def _gateway_env(self) -> dict[str, str]:
        return {
            "DATABASE_URL": f"sqlite:///{self._folder / 'ledger.db'}",
            "REDIS_URL": f"redis://{self.control.address}:{_REDIS}/0",
            "ADMIN_KEY": self.admin_key,
            "SCHEDULER_ADDRESS": self.scheduler_address,
            "SCHEDULER_TOKEN": self._token(SCHEDULER_NODE, Caller.GATEWAY),
            "STORE_TOKEN": self._token("store-source", Caller.GATEWAY),
            "STORE_ADDRESS": self.store_addresses["source"],
            "HTTP_PORT": str(_HTTP),
        }

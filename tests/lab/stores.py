"""Param-stores alone on hosts of a lab, commanded by the test instead of a scheduler.

    with Stores(lab, folder, {"source": lab["source"], "h1": lab["h1"]}, arena_bytes=96 << 20) as stores:
        pack = publish(stores.remote, 16 << 20)
        stores.fill("source", pack)
        stores.relay("h1", pack, ["source"]).result()
        stores.await_whole(["h1"], pack)

All stores share one remote store and fetch from it only on command. The lab's first host runs NATS and the Unix proxy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from tests.lab.child import Child, end_waves, start_waves, unix_proxy
from tests.lab.host import Host
from tests.lab.network import Lab
from tests.lab.raw_pack import RawPack
from tests.support.callers import every_token
from tests.support.guard import shared_memory_path
from torchrelay.cli.up.broker_programs import nats_program
from torchrelay.common.net.rpc.channels import with_token
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import param_store_pb2_grpc, types_pb2
from torchrelay.control.v1.reports_pb2 import PackCopy, StoreReport
from torchrelay.transfer.protocol.tickets import Ticket, TicketIssuer, derive_node_key

REMOTE = "remote"
WAIT_S = 60.0
_NATS, _FIRST_PORT = 4222, 7401
_EPOCH = 1
_AGAIN_S = 0.01  # a last stream's pin has no other notice of its end


class Stores:
    """Starts the stores on entry; on exit stops them and removes their arenas."""

    def __init__(self, lab: Lab, folder: Path, places: Mapping[str, Host], arena_bytes: int, **settings: str) -> None:
        self.control, self.places, self.remote = next(iter(lab)), dict(places), folder / REMOTE
        self.remote.mkdir()
        self.cluster_key = secrets.token_bytes(32)
        self.office = TicketIssuer(self.cluster_key)
        self._folder, self._settings = folder, {"ARENA_BYTES": str(arena_bytes), **settings}
        # Every namespace has its own ports, but several stores may share one.
        self._grpc_ports = {name: _FIRST_PORT + 2 * index for index, name in enumerate(self.places)}
        self.arenas = {name: shared_memory_path(f"{lab.name}-{name}") for name in self.places}
        self.children = {name: self._store(name, host) for name, host in self.places.items()}
        addresses = {name: f"{host.address}:{self._grpc_ports[name]}" for name, host in self.places.items()}
        self._waves = [[self._nats()], [*self.children.values(), unix_proxy(self.control, folder, addresses)]]
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            closing.callback(self._stop)
            start_waves(self._waves)
            closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        for channel in self._channels.values():
            channel.close()
        end_waves(self._waves)
        for path in self.arenas.values():
            path.unlink(missing_ok=True)

    # Commands of a scheduler

    def data_address(self, name: str) -> str:
        return f"{self.places[name].address}:{self._grpc_ports[name] + 1}"

    def ticket(self, pack: RawPack, holder: str, receiver: str, valid_s: float = 120.0) -> Ticket:
        return self.office.issue(pack.pack_id, holder, receiver, int((time.time() + valid_s) * 1000))

    def relay(
        self, target: str, pack: RawPack, sources: Sequence[str], num_striped: int = 1
    ) -> grpc.Future[pb.RelayReply]:
        """Tells a store to fetch a pack from these, which may include ``REMOTE``; ends once its range is reserved."""
        return self.relay_from(target, pack, [self.source(pack, name, target) for name in sources], num_striped)

    def relay_from(
        self, target: str, pack: RawPack, sources: Sequence[types_pb2.Source], num_striped: int = 1
    ) -> grpc.Future[pb.RelayReply]:
        request = pb.RelayRequest(
            epoch=_EPOCH,
            pack_id=pack.pack_id,
            sources=sources,
            relay_id="by hand",
            num_striped=num_striped,
            urgency=pb.RELAY_URGENCY_URGENT,
        )
        call: grpc.Future[pb.RelayReply] = self.stub(target).Relay.future(request, timeout=WAIT_S)
        return call

    def source(self, pack: RawPack, holder: str, receiver: str) -> types_pb2.Source:
        if holder == REMOTE:
            return types_pb2.Source(holder_id=REMOTE)
        ticket = self.ticket(pack, holder, receiver)
        return types_pb2.Source(holder_id=holder, data_address=self.data_address(holder), ticket=ticket)

    def fill(self, name: str, pack: RawPack) -> None:
        """Fetches the whole pack from the remote store."""
        self.relay(name, pack, [REMOTE]).result()
        self.await_whole([name], pack)

    def drop(self, names: Sequence[str], pack: RawPack) -> None:
        """Releases the copies, once the last streams that read them have ended."""
        request = pb.DropRequest(epoch=_EPOCH, pack_id=pack.pack_id)
        deadline = time.monotonic() + WAIT_S
        for name in names:
            while self.copy(name, pack) is not None and not self.stub(name).Drop(request, timeout=WAIT_S).dropped:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"store {name} does not drop its copy")
                time.sleep(_AGAIN_S)

    # Views of scheduler and worker

    def reports(self, name: str, timeout_s: float = WAIT_S) -> Iterator[StoreReport]:
        """At once, then at every change. Raises ``grpc.RpcError`` when the time is over or the store has gone."""
        call = self.stub(name).WatchCopies(pb.WatchCopiesRequest(), timeout=timeout_s, wait_for_ready=True)
        try:
            yield from call
        finally:
            call.cancel()

    def copy(self, name: str, pack: RawPack) -> PackCopy | None:
        return copy_in(next(self.reports(name)), pack)

    def await_whole(self, names: Sequence[str], pack: RawPack, timeout_s: float = WAIT_S) -> dict[str, PackCopy]:
        """The copies once all are whole. Raises RuntimeError for one that fails, ``grpc.RpcError`` for one too late."""
        deadline, whole = time.monotonic() + timeout_s, {}
        for name in names:
            for report in self.reports(name, deadline - time.monotonic()):
                copy = copy_in(report, pack)
                if copy is not None and copy.error:
                    raise RuntimeError(f"store {name}: {copy.error}")
                if copy is not None and copy.relay_end_unix_us and copy.num_chunks == copy.num_chunks_verified:
                    whole[name] = copy
                    break
        return whole

    @contextmanager
    def held(self, name: str, pack: RawPack) -> Iterator[Iterator[pb.HoldReply]]:
        """A worker's lease of a copy, whole or not, and what it hears."""
        call = self.stub(name).Hold(pb.HoldRequest(pack_id=pack.pack_id, owner_id="a worker"), timeout=WAIT_S)
        try:
            yield call
        finally:
            call.cancel()

    # Processes

    def restart(self, *names: str, keep_arena: bool) -> None:
        """Kills and restarts stores; with new arenas unless the old ones are kept."""
        for name in names:
            self.children[name].kill()
            if not keep_arena:
                self.arenas[name].unlink(missing_ok=True)
            self.reconnect(name)
            self.children[name].start()
        for name in names:
            self.children[name].await_ready()

    def reconnect(self, name: str) -> None:
        """Uses a new connection from now on: the old one may hang on a cut link."""
        if channel := self._channels.pop(name, None):
            channel.close()

    def stub(self, name: str) -> Any:
        if name not in self._channels:
            # A pool of its own: a channel made after a restart does not inherit the wait of one that found no store.
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.insecure_channel(f"unix:{self._folder / name}.sock", options)
            self._channels[name] = with_token(channel, every_token(self.cluster_key, name))
        return param_store_pb2_grpc.ParamStoreStub(self._channels[name])

    def _store(self, name: str, host: Host) -> Child:
        env = {
            "HOST": host.address,
            "PORT": str(self._grpc_ports[name]),
            "DATA_PORT": str(self._grpc_ports[name] + 1),
            "STORE_ID": name,
            "HOST_ID": name,
            "NODE_KEY": derive_node_key(self.cluster_key, name).hex(),
            "NATS_URL": f"nats://{self.control.address}:{_NATS}",
            "ARENA_PATH": str(self.arenas[name]),
            "DATA_DIR": str(self._folder / f"data-{name}"),
            "REMOTE_URL": self.remote.as_uri(),
            **self._settings,
        }
        variables = {f"TORCHRELAY_{key}": value for key, value in env.items()}
        return Child(f"store-{name}", host, ["torchrelay-param-store"], self._folder, variables)

    def _nats(self) -> Child:
        command = [nats_program(), "-a", self.control.address, "-p", str(_NATS)]
        return Child("nats", self.control, command, self._folder, ready_port=_NATS)


def copy_in(report: StoreReport, pack: RawPack) -> PackCopy | None:
    return next((copy for copy in report.copies if copy.pack_id == pack.pack_id), None)

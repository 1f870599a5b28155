"""Address pairs: the local one where it can be reached, otherwise, without an error, the network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.unit.transfer.loopback_holders import CLUSTER_KEY, SamplePack
from tests.unit.transfer.transport.transport_cases import receive
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport import shm
from torchrelay.transfer.transport.interface import Listener
from torchrelay.transfer.transport.local_first import LocalFirstTransport, open_local_listener, prefer_local
from torchrelay.transfer.transport.shm import ShmConnection, ShmTransport
from torchrelay.transfer.transport.tcp import TcpConnection, TcpTransport

KEY = derive_node_key(CLUSTER_KEY, "host-h")
PACK = SamplePack(300_000)


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:  # socket paths must be short
        yield Path(path)


@pytest.fixture
def network() -> Iterator[Listener]:
    listener = TcpTransport().listen("127.0.0.1", 0)
    yield listener
    listener.close()


def connected(address: str) -> type:
    connection = LocalFirstTransport(TcpTransport()).connect(address, 5.0)
    connection.close()
    return type(connection)


def test_missing_local_address_leaves_network_address() -> None:
    assert prefer_local("", "10.0.0.1:7") == "10.0.0.1:7"


def test_reachable_local_listener_used(folder: Path, network: Listener) -> None:
    local = open_local_listener(KEY, folder)
    assert local is not None
    assert connected(prefer_local(local.address, network.address)) is ShmConnection
    local.close()


def test_missing_or_dead_local_listener_skipped(folder: Path, network: Listener) -> None:
    assert connected(prefer_local(f"shm:{folder / 'nowhere'}", network.address)) is TcpConnection
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(folder / "dead"))
    assert connected(prefer_local(f"shm:{folder / 'dead'}", network.address)) is TcpConnection


def test_local_listener_of_other_user_skipped(folder: Path, network: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    local = open_local_listener(KEY, folder)
    assert local is not None
    monkeypatch.setattr(shm, "peer_user", lambda _: -1)
    assert connected(prefer_local(local.address, network.address)) is TcpConnection
    local.close()


def test_stopped_connect_does_not_try_network(folder: Path) -> None:
    local, stop = ShmTransport(backlog=0).listen(f"shm:{folder / 'full'}"), threading.Event()
    transport = LocalFirstTransport(TcpTransport())
    waiting = ShmTransport().connect(local.address, 1.0)  # fills the queue
    stop.set()
    with pytest.raises(InterruptedError):
        transport.connect(prefer_local(local.address, "127.0.0.1:1"), 1.0, stop)
    waiting.close()
    local.close()


def test_unreachable_pair_raises_network_error(folder: Path) -> None:
    with pytest.raises(ConnectionRefusedError):
        connected(prefer_local(f"shm:{folder / 'nowhere'}", "127.0.0.1:1"))


def test_node_replaces_only_its_own_dead_listener(folder: Path) -> None:
    first = open_local_listener(KEY, folder)
    assert first is not None
    assert open_local_listener(KEY, folder) is None  # its owner is alive
    other = open_local_listener(derive_node_key(b"another install's master key....", "host-h"), folder)
    assert other is not None and other.address != first.address
    for local in (first, other):
        local.close()
    assert list(folder.iterdir()) == []


def test_missing_folder_gives_no_local_listener(folder: Path) -> None:
    assert open_local_listener(KEY, folder / "missing") is None


def test_holder_serves_and_closes_both_listeners(folder: Path) -> None:
    find = {PACK.pack_id: PACK.buffer()}.get
    server = HolderServer("host-h", KEY, find, TcpTransport().listen("127.0.0.1", 0))
    local = open_local_listener(KEY, folder)
    assert local is not None
    server.add_listener(local)
    server.start()
    for address in (
        server.address,
        prefer_local(local.address, server.address),
        prefer_local(local.address, "nowhere"),
    ):
        sink, transport = PACK.sink(), LocalFirstTransport(TcpTransport())
        assert list(PACK.follow([PACK.source(address)], sink, transport=transport)) == list(PACK.chunks)
        assert sink.bytes_held == PACK.data
    server.close()
    assert list(folder.iterdir()) == []


def test_both_transports_share_connection_interface(folder: Path) -> None:
    local = open_local_listener(KEY, folder)
    assert local is not None
    near = LocalFirstTransport(TcpTransport()).connect(prefer_local(local.address, "127.0.0.1:1"), 1.0)
    far = local.accept()
    assert far is not None
    near.send([b"hello"])
    assert receive(far, 5) == b"hello"
    for end in (near, far):
        end.close()
    local.close()

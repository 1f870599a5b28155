"""Features of shared memory alone: allowed peers, checked claims, no leftovers, and pairs of addresses."""

from __future__ import annotations

import array
import errno
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.descriptors import open_descriptors
from tests.support.wait import HANG_S
from tests.unit.transfer.loopback_holders import CLUSTER_KEY, SamplePack
from tests.unit.transfer.transport.transport_cases import TransportCase, receive
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport import shm
from torchrelay.transfer.transport.interface import Connection, Listener
from torchrelay.transfer.transport.local_first import LocalFirstTransport, open_local_listener, prefer_local
from torchrelay.transfer.transport.shm import ShmConnection, ShmTransport
from torchrelay.transfer.transport.shm_ring import RING_BYTES, RingReader, make_ring
from torchrelay.transfer.transport.tcp import TcpConnection, TcpTransport

SPEAKER = """
import sys, threading
from torchrelay.transfer.transport.shm import ShmTransport
connection = ShmTransport().connect(sys.argv[1], 5.0)
connection.send([b"hello"])
threading.Event().wait()
"""


@pytest.fixture
def case() -> Iterator[TransportCase]:
    with TemporaryDirectory() as folder:
        yield TransportCase(ShmTransport(), f"shm:{folder}/socket")


def path_of(listener: Listener) -> Path:
    return Path(listener.address.removeprefix("shm:"))


def test_killed_peer_detected(case: TransportCase) -> None:
    with case.listening() as listener:
        peer = subprocess.Popen([sys.executable, "-c", SPEAKER, listener.address])
        accepted = listener.accept()
        assert accepted is not None
        assert receive(accepted, 5) == b"hello"
        assert not accepted.peer_closed()
        peer.kill()
        peer.wait()
        assert accepted.receive_into(memoryview(bytearray(1))) == 0
        with pytest.raises(OSError):
            accepted.send([bytes(4 * RING_BYTES)])
        accepted.close()


def test_another_user_is_refused_at_both_ends(case: TransportCase, monkeypatch: pytest.MonkeyPatch) -> None:
    with case.listening() as listener:
        assert path_of(listener).stat().st_mode & 0o777 == 0o600
        user = os.geteuid()
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: user + 1)
            with pytest.raises(PermissionError, match="another user"):
                case.transport.connect(listener.address, HANG_S)
            accepted: list[Connection | None] = []
            accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
            accepting.start()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
                foreign.settimeout(HANG_S)
                foreign.connect(str(path_of(listener)))
                assert foreign.recv(1) == b""  # refused
            listener.close()
            accepting.join()
            assert accepted == [None]


def test_only_dead_process_socket_replaced(case: TransportCase) -> None:
    path = Path(case.host.removeprefix("shm:"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with case.listening() as listener:
        with pytest.raises(OSError) as refused:
            case.transport.listen(case.host, 0)
        assert refused.value.errno == errno.EADDRINUSE
        case.transport.connect(listener.address, HANG_S).close()
    assert not path.exists()


def test_listener_keeps_successors_socket(case: TransportCase) -> None:
    with case.listening() as first:
        path_of(first).unlink()
        with case.listening() as second:
            first.close()
            assert path_of(second).exists()
            case.transport.connect(second.address, 1.0).close()


def test_nothing_is_left_open(case: TransportCase) -> None:
    before = open_descriptors()
    for _ in range(20):
        with case.pair() as (near, far):
            near.send([bytes(RING_BYTES)])
            receive(far, 100)
            near.close()  # twice is harmless
    assert open_descriptors() - before == set()


def test_sender_at_most_one_ring_ahead(case: TransportCase) -> None:
    with TransportCase(ShmTransport(send_timeout_s=0.1), case.host).pair() as (near, far):
        near.send([bytes(RING_BYTES)])
        with pytest.raises(TimeoutError):
            near.send([b"x"])
        assert receive(far, RING_BYTES) == bytes(RING_BYTES)
        near.send([b"y"])
        assert receive(far, 1) == b"y"


def test_connect_to_full_queue_times_out(case: TransportCase) -> None:
    with TransportCase(ShmTransport(backlog=0), case.host).listening() as listener:
        waiting = case.transport.connect(listener.address, HANG_S)
        with pytest.raises(TimeoutError):
            case.transport.connect(listener.address, 0.1)
        stop = threading.Event()
        stop.set()
        with pytest.raises(InterruptedError):
            case.transport.connect(listener.address, 5.0, stop)
        waiting.close()


def small_ring() -> int:
    ring = os.memfd_create("small", os.MFD_CLOEXEC)
    os.ftruncate(ring, 4096)
    return ring


def null() -> int:
    return os.open("/dev/null", os.O_RDWR)


@pytest.mark.parametrize(
    ("has_socket", "make", "reason"),
    [
        (True, [], "ring"),
        (True, [small_ring, small_ring], "ring"),
        (True, [null, null], "ring"),
        (False, [null, make_ring, make_ring], "no socket"),
    ],
)
def test_other_files_not_used(
    case: TransportCase, has_socket: bool, make: Sequence[Callable[[], int]], reason: str
) -> None:
    before = open_descriptors()
    with case.listening() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(path_of(listener)))
        near, far = socket.socketpair()
        given = [each() for each in make]
        with near, far:
            socket.send_fds(peer, [b"\0"], [near.fileno()] * has_socket + given)
        for descriptor in given:
            os.close(descriptor)
        accepted = listener.accept()
        assert accepted is not None
        with pytest.raises(ConnectionError, match=reason):
            accepted.receive_into(memoryview(bytearray(1)))
        accepted.close()
    assert open_descriptors() - before == set()


def test_late_failure_closes_each_descriptor_once(case: TransportCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> RingReader:
        raise OSError("no socket options left")

    gc.collect()  # leftovers of earlier tests
    before = open_descriptors()
    with case.pair() as (near, far):
        near.send([b"hello"])
        monkeypatch.setattr(shm, "RingReader", fail)
        with pytest.raises(OSError, match="no socket options left") as failed:
            far.receive_into(memoryview(bytearray(1)))
        # Their numbers are reused by files; the failed connection must not close one of them.
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(6)]
        del failed
        gc.collect()
        for descriptor in opened:
            os.close(descriptor)
    assert open_descriptors() - before == set()


@pytest.mark.parametrize("said", [struct.pack("=I", RING_BYTES + 1), struct.pack("=2I", RING_BYTES, 1), b"abc"])
def test_false_counts_end_connection(case: TransportCase, said: bytes) -> None:
    with case.listening() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(path_of(listener)))
        near, far = socket.socketpair()
        rings = array.array("i", [make_ring(), make_ring()])
        socket.send_fds(peer, [b"\0"], [far.fileno(), *rings])
        accepted = listener.accept()
        assert accepted is not None
        peer.send(said)
        with near, far, pytest.raises(ConnectionError, match="peer sent"):
            accepted.receive_into(memoryview(bytearray(8)))
        accepted.close()
        for ring in rings:
            os.close(ring)


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


def test_reachable_local_listener_used(folder: Path, network: Listener) -> None:
    local = open_local_listener(KEY, folder)
    assert local is not None
    assert connected(prefer_local(local.address, network.address)) is ShmConnection
    assert prefer_local("", network.address) == network.address
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

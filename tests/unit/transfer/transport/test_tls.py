"""The data plane over TLS: the same streams and limits, and only peers of the cluster."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.wait import HANG_S, wait_until
from tests.unit.transfer import loopback_holders
from tests.unit.transfer.loopback_holders import PackSink, SamplePack, receiver, silent_listener, tampering_proxy
from tests.unit.transfer.transport.transport_cases import receive
from torchrelay.common.identity.tls import Tls, TlsFiles
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.errors import SourcesExhausted
from torchrelay.transfer.fetch.follow import FollowOptions, fetch_head
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport import tls as tls_module
from torchrelay.transfer.transport.interface import Connection, Listener, TransferClass, Transport
from torchrelay.transfer.transport.tcp import TcpTransport, split_address
from torchrelay.transfer.transport.tls import TlsTransport, transport_for

CHUNK_BYTES = 64 << 10
PACK = SamplePack(20 * CHUNK_BYTES + 17, CHUNK_BYTES)
ALL = list(PACK.chunks)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def node(cluster: Authority) -> Transport:
    """The transport of a node of the cluster."""
    return transport_for(Tls(cluster.node("node")))


@pytest.fixture(scope="module")
def outsiders(cluster: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transport]:
    """Transports of peers outside the cluster."""
    mine, theirs = cluster.node("mine"), Authority(tmp_path_factory.mktemp("outsider")).node("theirs")
    return {
        "plain": transport_for(None),
        "another cluster": transport_for(Tls(theirs)),
        "another cluster, and knows our CA": transport_for(Tls(TlsFiles(mine.ca, theirs.cert, theirs.key))),
        "expired": transport_for(Tls(cluster.expired())),
    }


def serving(transport: Transport, *buffers: Buffer, holder_id: str = "host-h") -> AbstractContextManager[HolderServer]:
    return loopback_holders.serving(*buffers, holder_id=holder_id, transport=transport)


@contextmanager
def pair(transport: Transport) -> Iterator[tuple[Connection, Connection]]:
    """Two ends that have completed the handshake: the one that connected, and the one that accepted."""
    listener = transport.listen("127.0.0.1", 0)
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(lambda: transport.connect(listener.address, timeout_s=5.0))
        far = listener.accept()
        assert far is not None
        with pytest.raises(TimeoutError):
            far.receive_into(memoryview(bytearray(1)))
        near = connecting.result()
    yield near, far
    near.close()
    far.close()
    listener.close()


def follow_all(address: str, sink: PackSink, transport: Transport, stall_s: float = 5.0) -> list[int]:
    return list(PACK.follow([PACK.source(address)], sink, transport=transport, stall_s=stall_s))


def test_outsiders_are_refused_and_listener_stays_open(node: Transport, outsiders: dict[str, Transport]) -> None:
    sink = PACK.sink()
    with (
        serving(node, PACK.buffer()) as holder,
        socket.create_connection(split_address(holder.address)),
    ):  # beside a silent connection
        for transport in outsiders.values():
            with pytest.raises(SourcesExhausted):
                follow_all(holder.address, sink, transport, stall_s=2.0)
        assert not sink.accepted
        assert holder.bytes_sent == 0
        assert follow_all(holder.address, sink, node) == ALL


def test_outsiders_are_not_followed(node: Transport, outsiders: dict[str, Transport]) -> None:
    for transport in outsiders.values():
        sink = PACK.sink()
        with serving(transport, PACK.buffer()) as holder, pytest.raises(SourcesExhausted):
            follow_all(holder.address, sink, node, stall_s=2.0)
        assert not sink.accepted


def test_wire_carries_no_plaintext(node: Transport) -> None:
    seen, sink = bytearray(), PACK.sink()

    def tap(data: bytes, offset: int) -> bytes:
        seen.extend(data)
        return data

    with serving(node, PACK.buffer()) as holder, tampering_proxy(holder.address, tap) as proxy:
        assert follow_all(proxy, sink, node) == ALL
        assert fetch_head(PACK.source(holder.address), receiver(), FollowOptions(node)) == PACK.head
    assert len(seen) > len(PACK.data) and sink.bytes_held == PACK.data
    assert not any(PACK.data[at : at + 32] in seen for at in range(0, len(PACK.data), CHUNK_BYTES))


def test_parts_arrive_in_order_both_ways_at_once(node: Transport) -> None:
    parts = [bytes([number]) * size for number, size in enumerate([1, 0, 3 << 20, 7, 1 << 20])]
    whole = b"".join(parts)
    with pair(node) as (near, far), ThreadPoolExecutor(4) as threads:
        for end in (near, far):
            end.set_class(TransferClass.IDLE)
        sending = [threads.submit(end.send, parts) for end in (near, far)]
        receiving = [threads.submit(receive, end, len(whole)) for end in (near, far)]
        assert all(future.result() == whole for future in receiving)
        for future in sending:
            future.result()
        assert not far.peer_closed()
        near.close()
        wait_until(far.peer_closed)
        assert far.receive_into(memoryview(bytearray(1))) == 0


def test_receive_times_out_and_abort_wakes_sender(node: Transport) -> None:
    with pair(node) as (near, _), ThreadPoolExecutor(1) as threads:
        with pytest.raises(TimeoutError):
            near.receive_into(memoryview(bytearray(1)))
        sending = threads.submit(near.send, [bytes(64 << 20)])
        near.abort()
        with pytest.raises(OSError):
            sending.result(HANG_S)


def test_damaged_frame_is_an_error(node: Transport, cluster: Authority) -> None:
    listener = TcpTransport().listen("127.0.0.1", 0)
    server = Tls(cluster.node("node")).identity.server_context
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(lambda: node.connect(listener.address, 5.0))
        raw = listener.accept()
        assert raw is not None
        far = tls_module.TlsConnection(raw, server, is_server=True)
        with pytest.raises(TimeoutError):
            far.receive_into(memoryview(bytearray(1)))
        near = connecting.result()
        raw.send([b"\x17\x03\x03\x00\x20" + bytes(32)])  # a forged record
        with pytest.raises(OSError, match=r"(?i)mac"):
            receive(near, 1)
    for end in (near, far, listener):
        end.close()


def test_holder_without_handshake_given_up(node: Transport) -> None:
    with silent_listener() as address:
        with pytest.raises(TimeoutError, match="has not presented its certificate"):
            node.connect(address, timeout_s=0.2)
        stop = threading.Event()
        stop.set()
        with pytest.raises(InterruptedError):
            node.connect(address, timeout_s=5.0, stop=stop)


def test_follower_without_handshake_disconnected(cluster: Authority) -> None:
    listener = TlsTransport(Tls(cluster.node("node")), TcpTransport(), handshake_s=0.1).listen("127.0.0.1", 0)
    with socket.create_connection(split_address(listener.address)) as silent:
        far = listener.accept()
        assert far is not None
        view = memoryview(bytearray(1))
        with pytest.raises(TimeoutError):
            far.receive_into(view)
        with pytest.raises(ConnectionAbortedError, match="certificate"):
            for _ in range(20):
                silent.send(b"\x16\x03\x01\x02\x00"[:1])
                far.send([b"x"])
        far.close()
    listener.close()


def test_new_connections_use_replaced_files(tmp_path: Path) -> None:
    """Both ends get certificates of another CA while a connection stands."""
    first, successor = Authority(tmp_path / "first"), Authority(tmp_path / "successor")
    files = {name: first.node(name) for name in ("holder", "follower")}
    holder, follower = (TlsTransport(Tls(each, look_every_s=0), TcpTransport()) for each in files.values())
    with ThreadPoolExecutor(1) as threads:

        def connected(client: Transport) -> tuple[Connection, Connection]:
            accepting = threads.submit(accept_handshake, listener)
            return client.connect(listener.address, 60.0), accepting.result(60.0)

        listener = holder.listen("127.0.0.1", 0)
        before = connected(follower)
        for name, old in files.items():
            new = successor.node(name)
            for path, other in ((old.ca, new.ca), (old.cert, new.cert), (old.key, new.key)):
                path.write_bytes(other.read_bytes())
        after = connected(transport_for(Tls(successor.node("other"))))
        again = connected(follower)
        for near, far in (before, after, again):
            far.send([b"pages"])
            assert receive(near, 5) == b"pages"
            near.close()
            far.close()
        listener.close()


def accept_handshake(listener: Listener) -> Connection:
    """Accepts a connection and waits for its certificate."""
    connection = listener.accept()
    assert isinstance(connection, tls_module.TlsConnection)
    while not connection.handshake_step():
        with suppress(TimeoutError):
            assert connection.receive_records()
    return connection

"""The contract of every transport: order, ends, waiting, giving up, many at once."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.wait import HANG_S, wait_until
from tests.unit.transfer.transport.transport_cases import TransportCase, receive
from torchrelay.transfer.transport.interface import Connection
from torchrelay.transfer.transport.tcp import TcpTransport


@pytest.fixture
def case() -> TransportCase:
    return TransportCase()


@pytest.mark.parametrize(
    "sizes", [[1, 0, 3 << 20, 7, 1 << 20], [1] * 900, [52, 256 << 10] * 24, [(1 << 20) - 1, 2, 1 << 20]]
)
def test_parts_arrive_in_order_however_many_and_large(case: TransportCase, sizes: list[int]) -> None:
    parts = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    with case.pair() as (near, far):
        for sender, receiver in ((near, far), (far, near)):
            if sender is far:
                far.send([b"hello"])  # the accepted end sends first
                assert receive(near, 5) == b"hello"
            sending = threading.Thread(target=sender.send, args=(parts,))
            sending.start()
            assert receive(receiver, sum(sizes)) == b"".join(parts)
            sending.join()


def test_both_directions_at_once(case: TransportCase) -> None:
    data = random.Random(7).randbytes(8 << 20)
    with case.pair() as (near, far):
        near.send([b"?"])
        assert receive(far, 1) == b"?"
        with ThreadPoolExecutor(4) as threads:
            sending = [threads.submit(end.send, [data]) for end in (near, far)]
            assert list(threads.map(lambda end: receive(end, len(data)), (near, far))) == [data, data]
            for each in sending:
                each.result()


@pytest.mark.parametrize("num_bytes", [0, 1, 600 << 10])
def test_bytes_sent_before_close_arrive(case: TransportCase, num_bytes: int) -> None:
    with case.pair() as (near, far):
        near.send([bytes(num_bytes)])
        near.close()
        assert receive(far, num_bytes) == bytes(num_bytes)
        assert far.receive_into(memoryview(bytearray(1))) == 0
        assert far.peer_closed()


def test_end_is_seen_without_waiting(case: TransportCase) -> None:
    with case.pair() as (near, far):
        assert not near.peer_closed()
        assert not far.peer_closed()
        near.send([b"x"])
        assert receive(far, 1) == b"x"
        assert not far.peer_closed()
        near.abort()
        wait_until(far.peer_closed)
    with case.pair() as (near, far):
        far.close()
        wait_until(near.peer_closed)


def test_send_to_closed_peer_fails(case: TransportCase) -> None:
    with case.pair() as (near, far):
        near.send([b"x"])
        receive(far, 1)
        near.close()
        with pytest.raises(OSError):
            for _ in range(100):
                far.send([bytes(1 << 20)])


def test_receive_times_out_after_tick(case: TransportCase) -> None:
    with case.pair() as (near, far):
        for end in (near, far):
            with pytest.raises(TimeoutError):
                end.receive_into(memoryview(bytearray(1)))


def test_peer_that_reads_nothing_given_up() -> None:
    with (
        TransportCase(TcpTransport(send_timeout_s=0.1)).pair() as (near, _),
        pytest.raises(TimeoutError, match="accepted nothing"),
    ):
        near.send([bytes(64 << 20)])


def test_abort_wakes_blocked_threads(case: TransportCase) -> None:
    with case.pair() as (near, _), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(near.send, [bytes(64 << 20)])
        near.abort()
        with pytest.raises(OSError):
            sending.result(HANG_S)
        assert near.receive_into(memoryview(bytearray(1))) == 0


def test_many_connections_at_once(case: TransportCase) -> None:
    def echo(connection: Connection | None) -> None:
        assert connection is not None
        connection.send([receive(connection, 200_000)])
        connection.close()

    with case.listening() as listener, ThreadPoolExecutor(32) as threads:
        near = [case.transport.connect(listener.address, timeout_s=HANG_S) for _ in range(32)]
        echoing = [threads.submit(echo, listener.accept()) for _ in near]
        for number, connection in enumerate(near):
            connection.send([bytes([number]) * 200_000])
        for number, connection in enumerate(near):
            assert receive(connection, 200_000) == bytes([number]) * 200_000
            connection.close()
        for each in echoing:
            each.result()


def test_closed_listener_accepts_no_connection(case: TransportCase) -> None:
    accepted: list[Connection | None] = []
    with case.listening() as listener:
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
        accepting.start()
        listener.close()
        accepting.join(HANG_S)
        assert accepted == [None]
        with pytest.raises(OSError, match="cannot connect"):
            case.transport.connect(listener.address, timeout_s=1.0)


def test_bad_address_refused(case: TransportCase) -> None:
    for bad in ("", "host", "host:http"):
        with pytest.raises(ConnectionError, match="form"):
            case.transport.connect(bad, timeout_s=1.0)

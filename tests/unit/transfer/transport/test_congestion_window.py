"""The congestion window over simulated links, and pacing by it on real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.transfer.transport.congestion_window import (
    BUSY_SHARE,
    INCREASE_FACTOR,
    INITIAL_WINDOW_BYTES,
    MAX_WINDOW_BYTES,
    MIN_WINDOW_BYTES,
    TARGET_QUEUE_S,
    CongestionWindow,
    ConnectionCounters,
    recent_rtt_s,
)
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.iovec import drop_prefix, nonempty_views, take_prefix
from torchrelay.transfer.transport.paced_sender import PacedSender, can_pace
from torchrelay.transfer.transport.tcp import TcpConnection

URGENT, IDLE = TransferClass.URGENT, TransferClass.IDLE
STEP_S = 0.0001
SAMPLE_S = 0.001
LAN_BYTES_PER_S = 50e6
MS = 0.001


@dataclass
class Stream:
    """A paced sender on a simulated link; ``wants_bytes_per_s`` is what it has to send."""

    pace: CongestionWindow
    wants_bytes_per_s: float = 1e12
    num_acks: float = 0.0
    srtt_s: float = 0.0
    min_rtt_s: float = 1.0
    sending_s: float = 0.0
    sent_bytes: float = 0.0

    @classmethod
    def of(cls, transfer_class: TransferClass, base_s: float, wants_bytes_per_s: float = 1e12) -> Stream:
        return cls(
            CongestionWindow(transfer_class, ConnectionCounters(0.0, base_s, base_s, 0, 0.0)),
            wants_bytes_per_s,
            srtt_s=base_s,
        )

    def rate(self, rtt_s: float) -> float:
        return min(self.pace.window_bytes / rtt_s, self.wants_bytes_per_s)

    def step(self, rtt_s: float, rate: float) -> None:
        acks = rate * STEP_S / 16_000  # of some ten segments each
        self.srtt_s += (rtt_s - self.srtt_s) * (1 - (7 / 8) ** acks)
        self.num_acks += acks
        self.min_rtt_s = min(self.min_rtt_s, rtt_s)
        self.sent_bytes += rate * STEP_S
        self.sending_s += STEP_S * (rate < self.wants_bytes_per_s)

    def observe(self, at_s: float) -> None:
        self.pace.observe(ConnectionCounters(at_s, self.srtt_s, self.min_rtt_s, int(self.num_acks), self.sending_s))


@dataclass
class Link:
    """A queue in which a stream that yields to no other may also hold bytes."""

    bytes_per_s: float
    base_s: float
    streams: Sequence[Stream]
    now_s: float = 0.0
    queue_bytes: float = 0.0
    queues_s: list[float] = field(default_factory=list)

    def run(self, for_s: float, other_queue_bytes: float = 0.0) -> None:
        """The other stream keeps this many bytes in the queue."""
        for step in range(round(for_s / STEP_S)):
            self.now_s += STEP_S
            queue_s = (self.queue_bytes + other_queue_bytes) / self.bytes_per_s
            rtt_s = self.base_s + queue_s
            rates = [stream.rate(rtt_s) for stream in self.streams]
            for stream, rate in zip(self.streams, rates, strict=True):
                stream.step(rtt_s, rate)
            own = sum(min(stream.pace.window_bytes, stream.rate(rtt_s) * rtt_s) for stream in self.streams)
            self.queue_bytes = max(0.0, own - self.bytes_per_s * self.base_s)
            self.queues_s.append(queue_s)
            if step % round(max(SAMPLE_S, self.base_s) / STEP_S) == 0:
                for stream in self.streams:
                    stream.observe(self.now_s)


@pytest.mark.parametrize("transfer_class", [URGENT, IDLE])
@pytest.mark.parametrize("bytes_per_s", [12e6, LAN_BYTES_PER_S, 1.2e9])
@pytest.mark.parametrize("base_s", [0.1 * MS, 1 * MS, 5 * MS])
def test_idle_link_is_filled_with_short_queue(transfer_class: TransferClass, bytes_per_s: float, base_s: float) -> None:
    stream = Stream.of(transfer_class, base_s)
    link = Link(bytes_per_s, base_s, [stream])
    link.run(0.2)
    begun, link.queues_s = stream.sent_bytes, []
    link.run(0.3)
    possible = min(bytes_per_s, MAX_WINDOW_BYTES / base_s) * 0.3
    assert stream.sent_bytes - begun >= 0.97 * possible
    bearable_s = 1.25 * TARGET_QUEUE_S[transfer_class] + INCREASE_FACTOR * base_s + MIN_WINDOW_BYTES / bytes_per_s
    assert sum(link.queues_s) / len(link.queues_s) <= bearable_s


@pytest.mark.parametrize("transfer_class", [URGENT, IDLE])
def test_window_yields_and_recovers_within_milliseconds(transfer_class: TransferClass) -> None:
    stream = Stream.of(transfer_class, 0.1 * MS)
    link = Link(LAN_BYTES_PER_S, 0.1 * MS, [stream])
    link.run(0.1)
    others = 3 * MS * LAN_BYTES_PER_S
    link.run(0.012, others)
    begun = stream.sent_bytes
    link.run(0.05, others)
    assert stream.sent_bytes - begun <= 0.07 * LAN_BYTES_PER_S * 0.05
    link.run(0.005)
    begun = stream.sent_bytes
    link.run(0.05)
    assert stream.sent_bytes - begun >= 0.95 * LAN_BYTES_PER_S * 0.05


def test_idle_class_yields_to_urgent_class() -> None:
    base_s = 0.1 * MS
    idle, urgent = Stream.of(IDLE, base_s), Stream.of(URGENT, base_s)
    link = Link(LAN_BYTES_PER_S, base_s, [idle])
    link.run(0.1)
    link.streams = [idle, urgent]
    link.run(0.1)
    begun = idle.sent_bytes, urgent.sent_bytes
    link.run(0.2)
    assert urgent.sent_bytes - begun[1] > 2 * (idle.sent_bytes - begun[0])


def test_slowed_link_stays_filled() -> None:
    stream = Stream.of(URGENT, 0.1 * MS)
    link = Link(LAN_BYTES_PER_S, 0.1 * MS, [stream])
    link.run(0.1)
    link.bytes_per_s /= 4
    link.run(0.02)
    begun = stream.sent_bytes
    link.run(0.1)
    assert stream.sent_bytes - begun >= 0.97 * link.bytes_per_s * 0.1


def test_small_sender_keeps_its_window() -> None:
    stream = Stream.of(URGENT, 0.1 * MS, wants_bytes_per_s=LAN_BYTES_PER_S / 2)
    Link(LAN_BYTES_PER_S, 0.1 * MS, [stream]).run(0.2)
    assert stream.pace.window_bytes == INITIAL_WINDOW_BYTES


def test_queues_of_microseconds_are_ignored() -> None:
    stream = Stream.of(IDLE, 20e-6)
    Link(1e11, 20e-6, [stream]).run(0.05)
    assert stream.pace.window_bytes > 1 << 20


def test_without_acknowledgements_nothing_changes() -> None:
    pace = CongestionWindow(URGENT, ConnectionCounters(0.0, MS, MS, 5, 0.0))
    assert pace.observe(ConnectionCounters(0.1, 9 * MS, MS, 5, 0.1)) == INITIAL_WINDOW_BYTES


@given(st.floats(1e-5, 1.0), st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=20))
def test_recent_round_trip_ignores_older_minimum(old_s: float, new_s: list[float]) -> None:
    smoothed = old_s
    for rtt_s in new_s:
        smoothed += (rtt_s - smoothed) / 8
    before = ConnectionCounters(0.0, old_s, 1e-5, 7, 0.0)
    recent_s = recent_rtt_s(before, ConnectionCounters(1.0, smoothed, 1e-5, 7 + len(new_s), BUSY_SHARE))
    assert min(new_s) * 0.99 - 1e-9 <= recent_s <= max(new_s) * 1.01 + 1e-9


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends with addresses of their own, as between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        far, _ = listener.accept()
    with near, far:
        yield near, far


def drain(end: socket.socket, received: bytearray) -> None:
    while data := end.recv(1 << 20):
        received += data


def test_window_bounds_send_buffer_and_keeps_order(link: tuple[socket.socket, socket.socket]) -> None:
    near, far = link
    assert can_pace(near)
    received = bytearray()
    receiving = threading.Thread(target=drain, args=(far, received))
    receiving.start()
    sender = PacedSender(near, TransferClass.URGENT)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == INITIAL_WINDOW_BYTES
    data = bytes(range(256)) * (32 << 10)
    pending = memoryview(data)
    while pending:
        num_sent = sender.sendmsg([pending[:100], pending[100:]])
        assert num_sent <= 1 << 20
        pending = pending[num_sent:]
    near.shutdown(socket.SHUT_WR)
    receiving.join()
    assert received == data


def test_unread_bytes_limited_to_window(link: tuple[socket.socket, socket.socket]) -> None:
    near, far = link
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sender = PacedSender(near, TransferClass.IDLE)
    near.setblocking(False)
    taken = 0
    with pytest.raises(BlockingIOError):
        while True:
            taken += sender.sendmsg([memoryview(bytes(1 << 20))])
    assert taken < MAX_WINDOW_BYTES
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * INITIAL_WINDOW_BYTES


def test_same_host_transfers_are_not_paced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        assert not can_pace(near)
        before = near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        TcpConnection(near).set_class(TransferClass.IDLE)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_class_changes_on_broken_connection(link: tuple[socket.socket, socket.socket]) -> None:
    near, far = link
    connection = TcpConnection(near)
    for transfer_class in (TransferClass.IDLE, TransferClass.URGENT, TransferClass.KV):
        connection.set_class(transfer_class)
        connection.send([b"one", b"", b"two"])
        assert far.recv(6, socket.MSG_WAITALL) == b"onetwo"
    connection.close()
    connection.set_class(TransferClass.URGENT)


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_pieces_add_up_to_whole_text(parts: list[bytes], sizes: list[int]) -> None:
    pending = nonempty_views(parts)
    pieces: list[bytes] = []
    while pending:
        size = sizes[len(pieces) % len(sizes)]
        piece = take_prefix(pending, size)
        assert 0 < sum(map(len, piece)) <= size
        drop_prefix(pending, sum(map(len, piece)))
        pieces.append(b"".join(piece))
    assert b"".join(pieces) == b"".join(parts)

"""Frames round-trip, anything else is a protocol violation, and a closed stream waits for its senders."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.wait import HANG_S
from torchrelay.common.errors import TorchrelayError
from torchrelay.transfer.errors import ProtocolViolation, TicketExpired
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.protocol.frame_stream import ChunkRevoked, FrameStream
from torchrelay.transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_REFUSAL_BYTES,
    MAX_WANT_BYTES,
    FrameKind,
    Hello,
    Refusal,
    decode,
    encode,
    pack_bitmap,
    pack_header,
    pack_runs,
    unpack_bitmap,
    unpack_header,
    unpack_runs,
)
from torchrelay.transfer.transport.interface import TransferClass


def test_headers_and_messages_read_back() -> None:
    packed = pack_header(FrameKind.CHUNK, 4 << 20, 77, b"d" * 32)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == (FrameKind.CHUNK, 77, 4 << 20, b"d" * 32)
    hello = Hello(1, "host-r", b"ticket", b"challenge", 1250)
    assert decode(encode(hello), Hello) == hello


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_is_no_header(packed: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        unpack_header(packed)


def test_unknown_kinds_are_refused() -> None:
    packed = bytearray(pack_header(FrameKind.CHUNK, 0))
    packed[4] = 99
    with pytest.raises(ProtocolViolation, match="kind 99"):
        unpack_header(packed)


@given(st.permutations(range(30)), st.integers(0, 30))
def test_wanted_chunks_keep_their_order(order: list[int], count: int) -> None:
    wanted = order[:count]
    assert unpack_runs(pack_runs(wanted), 30) == wanted


def test_whole_pack_is_one_run_and_scattered_pack_fits() -> None:
    assert len(pack_runs(range(100_000))) == 8
    assert len(pack_runs(range(0, 100_000, 2))) <= MAX_WANT_BYTES


@pytest.mark.parametrize(
    "packed", [b"1234567", pack_runs([10]), pack_runs(range(5, 11)), pack_runs([*range(9), *range(9)])]
)
def test_more_than_there_is_cannot_be_wanted(packed: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        unpack_runs(packed, 10)


@given(st.lists(st.integers(0, 1), max_size=70))
def test_bitmaps_read_back(marks: list[int]) -> None:
    packed = pack_bitmap(bytes(marks))
    assert len(packed) == (len(marks) + 7) // 8
    assert unpack_bitmap(packed, len(marks)) == bytes(marks)


@pytest.mark.parametrize(("packed", "num_chunks"), [(b"", 1), (b"\1\0", 8), (b"\x80", 7)])
def test_bitmap_of_wrong_size_refused(packed: bytes, num_chunks: int) -> None:
    with pytest.raises(ProtocolViolation, match="bitmap"):
        unpack_bitmap(packed, num_chunks)


@given(st.binary(max_size=64))
@example(b"\x92\xa1\xff\xa0")  # a string that is not UTF-8
def test_garbage_is_no_message(packed: bytes) -> None:
    for kind in (Hello, Refusal):
        try:
            message = decode(packed, kind)
        except ProtocolViolation as violation:
            assert "malformed" in violation.message
        else:
            assert isinstance(message, kind)


def test_refusals_keep_their_class_and_stay_short() -> None:
    encoded = encode(Refusal.of(TicketExpired("too late " * 10_000)))
    assert len(encoded) <= MAX_REFUSAL_BYTES
    error = decode(encoded, Refusal).error()
    assert type(error) is TicketExpired
    assert error.message.startswith("too late")
    assert type(Refusal("of a later version", "hm").error()) is TorchrelayError


class FullConnection:
    """Its peer accepts nothing: a send blocks until the connection is aborted."""

    def __init__(self, arriving: bytes = b"") -> None:
        self.sending, self.aborted = threading.Event(), threading.Event()
        self.calls: list[str] = []
        self.arriving = arriving

    def receive_into(self, view: memoryview) -> int:
        """At most 16 bytes of ``arriving``."""
        if not self.arriving:
            raise TimeoutError
        part, self.arriving = self.arriving[: min(len(view), 16)], self.arriving[min(len(view), 16) :]
        view[: len(part)] = part
        return len(part)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        self.sending.set()
        self.aborted.wait(HANG_S)
        self.calls.append("sent")

    def set_class(self, transfer_class: TransferClass) -> None:
        return

    def peer_closed(self) -> bool:
        return False

    def abort(self) -> None:
        self.calls.append("aborted")
        self.aborted.set()

    def close(self) -> None:
        self.calls.append("closed")


def test_close_waits_for_senders() -> None:
    connection = FullConnection()
    frames = FrameStream(connection, 1.0)
    sending = threading.Thread(target=frames.send, args=(FrameKind.ALIVE,))
    sending.start()
    assert connection.sending.wait(HANG_S)
    frames.close()
    sending.join()
    assert connection.calls == ["aborted", "sent", "closed"]
    frames.abort()
    assert connection.calls[-1] == "closed"


def test_rest_of_revoked_chunk_is_skipped() -> None:
    frame = pack_header(FrameKind.CHUNK, 40, 7)
    upstream = Upstream(FrameStream(FullConnection(frame + b"a" * 40 + frame), 1.0), b"", TransferClass.KV)
    header, view = upstream.frames.receive_header(), memoryview(bytearray(40))
    received: list[int] = []

    def revoke_once(num_bytes: int) -> None:
        received.append(num_bytes)
        if len(received) == 1:
            raise ChunkRevoked

    upstream.frames.watch = revoke_once
    assert not upstream.receive_chunk(header, view, None)
    assert bytes(view) == b"a" * 16 + bytes(24) and sum(received) == 40
    assert upstream.frames.receive_header() == header, "the next frame follows"

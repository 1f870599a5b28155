"""Frames round-trip; anything else is a protocol violation, never an allocation."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchrelay.common.errors import TorchrelayError
from torchrelay.transfer.errors import ProtocolViolation, TicketExpired
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


def test_headers_read_back() -> None:
    packed = pack_header(FrameKind.CHUNK, 4 << 20, 77, b"d" * 32)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == (FrameKind.CHUNK, 77, 4 << 20, b"d" * 32)


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


def test_hello_frames_read_back() -> None:
    hello = Hello(1, "host-r", b"ticket", b"challenge", 1250)
    assert decode(encode(hello), Hello) == hello


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

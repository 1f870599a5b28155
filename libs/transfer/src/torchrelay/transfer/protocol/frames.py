"""The frames that follower and holder exchange: a fixed header, then a payload of bounded length.

follower                                     holder
HELLO   ticket, receiver, challenge  ->
                                     <-      CHALLENGE   the holder's proof, its own challenge
PROOF   the receiver's proof         ->
                                     <-      HEAD        the buffer's head
                                     <-      HAVE        the number of chunks; a bitmap of those ready so far
WANT    runs of chunks, in order     ->                  at any time
CANCEL  runs no longer wanted        ->
                                     <-      CHUNK ...   each as soon as it is ready
                                     <-      GAINED      runs of chunks that became ready since
at any time                          <-      ALIVE       no wanted chunk is ready, but the holder is alive
                                     <-      REFUSED     the reason; the last frame

A cancelled chunk may still arrive if its transmission had begun. GAINED omits chunks already sent.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from torchrelay.common.errors import TorchrelayError, error_class
from torchrelay.transfer.errors import ProtocolViolation
from torchrelay.transfer.manifest import DIGEST_BYTES

PROTOCOL_VERSION = 3
MAX_HELLO_BYTES = 8 << 10
MAX_REFUSAL_BYTES = 4 << 10
MAX_HEAD_BYTES = 64 << 20
MAX_WANT_BYTES = 1 << 20
MAX_HAVE_BYTES = 1 << 20
NO_DIGEST = bytes(DIGEST_BYTES)

_HEADER = struct.Struct(">4sBxxxII32s")  # magic, kind, chunk index, payload bytes, BLAKE3 of a chunk
_MAGIC = b"TRF1"
_RUN = struct.Struct(">II")  # first chunk, number of chunks
_DIGITS = bytes.maketrans(b"\0\1", b"01")
_FLAGS = bytes.maketrans(b"01", b"\0\1")
HEADER_BYTES = _HEADER.size
Message = TypeVar("Message", bound=msgspec.Struct)


class FrameKind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WANT = 4
    HEAD = 5
    CHUNK = 6
    ALIVE = 7
    REFUSED = 8
    HAVE = 9
    CANCEL = 10
    GAINED = 11


class FrameHeader(NamedTuple):
    """The header before every payload. ``chunk`` is a chunk's number, in HAVE the number of chunks, otherwise 0."""

    kind: FrameKind
    chunk: int
    num_bytes: int
    digest: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The follower's first frame: its identity, its ticket, and how often it wants a keep-alive."""

    protocol_version: int
    receiver_id: str
    ticket: bytes  # a serialized Ticket
    challenge: bytes
    alive_every_ms: int
    transfer_class: int = 0  # a TransferClass


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """The holder's last frame: an error's code and message."""

    code: str
    message: str

    @classmethod
    def of(cls, error: TorchrelayError) -> Refusal:
        return cls(error.code, error.message[: MAX_REFUSAL_BYTES // 8])

    def error(self) -> TorchrelayError:
        return error_class(self.code)(self.message)


def pack_header(kind: FrameKind, num_bytes: int, chunk: int = 0, digest: bytes = NO_DIGEST) -> bytes:
    return _HEADER.pack(_MAGIC, kind, chunk, num_bytes, digest)


def unpack_header(packed: bytes | bytearray | memoryview) -> FrameHeader:
    """Decodes a header. Raises ``ProtocolViolation`` for anything but a frame of this version."""
    magic, kind, chunk, num_bytes, digest = _HEADER.unpack(packed)
    if magic != _MAGIC or kind not in FrameKind._value2member_map_:
        raise ProtocolViolation(f"the peer sent no data-plane frame: magic {magic!r}, kind {kind}")
    return FrameHeader(FrameKind(kind), chunk, num_bytes, digest)


def pack_runs(wanted: Sequence[int]) -> bytes:
    """Packs chunk numbers, in the order wanted, as runs of consecutive numbers: a whole pack is one run."""
    return b"".join(_RUN.pack(begin, count) for begin, count in _runs(wanted))


def unpack_runs(packed: bytes, num_chunks: int) -> list[int]:
    """Unpacks runs. Raises ``ProtocolViolation`` for chunks beyond the buffer's end, or more chunks than it has."""
    if len(packed) % _RUN.size:
        raise ProtocolViolation("the list of chunk runs is truncated")
    wanted: list[int] = []
    for begin, count in _RUN.iter_unpack(packed):
        if begin + count > num_chunks or len(wanted) + count > num_chunks:
            raise ProtocolViolation(f"chunks [{begin}, {begin + count}) are requested from a buffer of {num_chunks}")
        wanted.extend(range(begin, begin + count))
    return wanted


def pack_bitmap(flags: bytes | bytearray) -> bytes:
    """Packs flags of one byte per chunk, 0 or 1, as a bitmap: chunk 0 is the lowest bit of the first byte."""
    digits = flags[::-1].translate(_DIGITS)  # converted as a number in base 2, in linear time
    return int(digits or b"0", 2).to_bytes((len(flags) + 7) // 8, "little")


def unpack_bitmap(packed: bytes, num_chunks: int) -> bytearray:
    """Unpacks a bitmap. Raises ``ProtocolViolation`` when its length does not match ``num_chunks``."""
    number = int.from_bytes(packed, "little")
    if len(packed) != (num_chunks + 7) // 8 or number >> num_chunks:
        raise ProtocolViolation(f"a bitmap of {len(packed)} bytes does not fit {num_chunks} chunks")
    return bytearray(f"{number:0{num_chunks}b}"[: -num_chunks - 1 : -1].encode().translate(_FLAGS))


def _runs(wanted: Iterable[int]) -> Iterable[tuple[int, int]]:
    begin = end = -1
    for index in wanted:
        if index != end:
            if end > begin:
                yield begin, end - begin
            begin = index
        end = index + 1
    if end > begin:
        yield begin, end - begin


def encode(message: Hello | Refusal) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(packed: bytes, kind: type[Message]) -> Message:
    """Decodes a message. Raises ``ProtocolViolation`` for anything but a message of this kind."""
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"malformed {kind.__name__}: {error}") from error

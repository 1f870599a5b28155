"""The lines of a batch's input, and those of its files of results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from blake3 import blake3

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.validation import quote_value
from torchrelay.gateway.batches.core import MAX_LINES
from torchrelay.gateway.clients.rechunk import ByteStream

MAX_ERRORS: Final = 100  # of a file, that are told
MAX_ID_CHARS: Final = 512
_LINES_AT_ONCE: Final = 500
_MAX_ENVELOPE_BYTES: Final = 64 << 10
_LINE_ENDS: Final = "\x85\u2028\u2029"  # to Python's splitlines, by which callers may take a file of results apart


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streams(msgspec.Struct):
    stream: Any = None


class _Models(msgspec.Struct):
    model: str = ""


_DECODER, _STREAMS = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Streams)
_MODELS = msgspec.json.Decoder(_Models)


class LineFault(InvalidRequest):
    """A line that no request can be made of; ``field`` is the member at fault."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    custom_id: str
    body: bytes  # JSON of an object

    @property
    def model(self) -> str:
        """The model that the line names; empty if it names none."""
        try:
            return _MODELS.decode(self.body).model
        except msgspec.MsgspecError:
            return ""

    def check_is_whole(self) -> None:
        """Raises ``InvalidRequest`` if the answer is to be streamed, which no file can be."""
        try:
            streams = _STREAMS.decode(self.body).stream
        except msgspec.MsgspecError:  # the path itself says what is wrong
            return
        if streams:
            raise InvalidRequest("stream must be false or missing in a batch", field="stream")


async def numbered_lines(content: ByteStream, max_body_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 0. Raises ``LineFault`` for one that is too long."""
    pending, number, max_bytes = bytearray(), 0, max_body_bytes + _MAX_ENVELOPE_BYTES
    async for piece in content:
        *whole, rest = piece.split(b"\n")
        for part in whole:
            pending += part
            if pending.strip():
                yield number, _checked(pending, number, max_bytes)
            number += 1
            pending = bytearray()
            if number > 2 * MAX_LINES:  # blank ones are read, too
                raise LineFault(f"the file has more than {2 * MAX_LINES:,} lines, with blank ones", field="line")
            if number % _LINES_AT_ONCE == 0:
                await asyncio.sleep(0)  # lets others run
        pending += rest
        _checked(pending, number, max_bytes)
    if pending.strip():
        yield number, _checked(pending, number, max_bytes)


def _checked(line: bytearray, number: int, max_bytes: int) -> bytes:
    if len(line) > max_bytes:
        raise LineFault(f"line {number + 1} has more than {max_bytes:,} bytes", field="line")
    return bytes(line)


def line_of(encoded: bytes, endpoint: str) -> BatchLine:
    """Raises ``LineFault``."""
    try:
        line = _DECODER.decode(encoded)
    except msgspec.ValidationError as error:
        raise LineFault(f"the line must have custom_id, method, url and body: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineFault("the line is not valid JSON") from error
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        raise LineFault(f"custom_id must have 1 to {MAX_ID_CHARS} characters", field="custom_id")
    if line.method != "POST":
        raise LineFault(f"method must be POST, not {quote_value(line.method)}", field="method")
    if line.url != endpoint:
        raise LineFault(f"url must be {endpoint} as the batch's endpoint, not {quote_value(line.url)}", field="url")
    body = bytes(line.body)
    if not body.lstrip().startswith(b"{"):
        raise LineFault("body must be an object", field="body")
    return BatchLine(line.custom_id, body)


async def input_faults(content: ByteStream, endpoint: str, max_body_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """The number of lines of a batch's input, and what is wrong with them, in OpenAI's form."""
    seen: set[bytes] = set()  # digests of custom ids
    faults: list[dict[str, Any]] = []
    num_lines = 0

    def note(number: int | None, error: LineFault, code: str) -> None:
        if len(faults) < MAX_ERRORS:
            at = None if number is None else number + 1
            faults.append({"code": code, "message": error.message, "param": error.field, "line": at})

    try:
        async for number, encoded in numbered_lines(content, max_body_bytes):
            num_lines += 1
            if num_lines > MAX_LINES:
                raise LineFault(f"the file has more than {MAX_LINES:,} lines")
            try:
                line = line_of(encoded, endpoint)
            except LineFault as fault:
                note(number, fault, "invalid_request" if fault.field else "invalid_json_line")
                continue
            digest = blake3(line.custom_id.encode("utf-8", "surrogatepass")).digest(16)
            if digest in seen:
                message = f"custom_id {quote_value(line.custom_id)} is that of an earlier line"
                note(number, LineFault(message, field="custom_id"), "duplicate_custom_id")
            seen.add(digest)
    except LineFault as too_large:
        note(None, too_large, "invalid_file")
    if not num_lines and not faults:
        note(None, LineFault("the file has no line"), "empty_file")
    return num_lines, faults


def result_line(batch_id: str, number: int, custom_id: str, request_id: str, status: int, body: str) -> bytes:
    """A line of a file of results, with an answer."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body.encode())}
    return _encoded(batch_id, number, custom_id, response, None)


def missing_line(batch_id: str, number: int, custom_id: str, error: tuple[str, str]) -> bytes:
    """A line of the file of errors about a request that has no answer. ``error``: its code and message."""
    return _encoded(batch_id, number, custom_id, None, {"code": error[0], "message": error[1]})


def _encoded(batch_id: str, number: int, custom_id: str, response: Any, error: Any) -> bytes:
    line_id = f"batch_req-{batch_id.removeprefix('batch-')}-{number}"
    line = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    encoded = msgspec.json.encode(line)
    for character in _LINE_ENDS:
        encoded = encoded.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return encoded + b"\n"

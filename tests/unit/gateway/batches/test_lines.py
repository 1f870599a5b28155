"""Inputs of batches: what is a line, and what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.batches.core import MAX_LINES
from torchrelay.gateway.batches.lines import input_faults, numbered_lines, result_line

PATH = "/v1/completions"
GOOD = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"model": "m"}}


async def pieces(content: bytes, size: int = 1 << 20) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), size):
        yield content[begin : begin + size]


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.integers(1, 20))
async def test_pieces_of_any_size_give_the_same_lines(lines: list[bytes], size: int) -> None:
    numbered = [each async for each in numbered_lines(pieces(b"\n".join(lines), size), 1000)]
    assert numbered == [(number, line) for number, line in enumerate(lines) if line.strip()]


def changed(**changes: Any) -> bytes:
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("line", "code", "field"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (changed(custom_id=...), "invalid_json_line", None),
        (changed(custom_id=""), "invalid_request", "custom_id"),
        (changed(custom_id="x" * 513), "invalid_request", "custom_id"),
        (changed(method="GET"), "invalid_request", "method"),
        (changed(url="/v1/embeddings"), "invalid_request", "url"),
        (changed(body=[1]), "invalid_request", "body"),
        (changed(custom_id="first"), "duplicate_custom_id", "custom_id"),
    ],
)
async def test_faulty_line_is_told_with_its_number(line: bytes, code: str, field: str | None) -> None:
    content = b"\n".join([changed(custom_id="first"), b"", line, changed(custom_id="last")])
    num_lines, [fault] = await input_faults(pieces(content), PATH, 1000)
    assert (num_lines, fault["code"], fault["param"], fault["line"]) == (3, code, field, 3)


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"x" * 100_000, "invalid_file")],
)
async def test_file_without_lines_or_with_too_much_is_refused(content: bytes, code: str) -> None:
    _, faults = await input_faults(pieces(content), PATH, 1000)
    assert faults[-1]["code"] == code


async def test_file_with_too_many_lines_is_refused() -> None:
    content = b"".join(changed(custom_id=f"line-{number}") + b"\n" for number in range(MAX_LINES + 1))
    _, [fault] = await input_faults(pieces(content), PATH, 1000)
    assert (fault["code"], fault["line"]) == ("invalid_file", None)
    assert await input_faults(pieces(content[: content.rindex(b"\n", 0, -1)]), PATH, 1000) == (MAX_LINES, [])


def test_line_of_results_is_one_line_to_any_reader() -> None:
    line = result_line("batch-1", 3, "a\u2028b", "req-1", 200, '{"text": "\x85\u2029"}').decode()
    assert len(line.splitlines()) == 1
    read = json.loads(line)
    assert (read["custom_id"], read["response"]["body"]) == ("a\u2028b", {"text": "\x85\u2029"})

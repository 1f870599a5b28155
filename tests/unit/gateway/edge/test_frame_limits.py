"""Floods and endless frames of a client are faulty, however their bytes are split; ordinary traffic is not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.http2_client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header_block,
)
from torchrelay.gateway.edge.frame_limits import MAX_FRAME_BYTES, STREAM_HEADER, FrameCounter, FrameLimits

GREETING = PREFACE + frame(SETTINGS)
PRIORITY = 2
SMALL_PING = frame(PING, payload=bytes(8))
TOO_MANY = "too many frames that carry nothing"
LIMITS = FrameLimits(header_block_bytes=1000, allowance=80, allowance_per_s=20.0)


def sent_on(*parts: bytes) -> bytes:
    """What the server gets of the parts."""
    counter = FrameCounter(0.0, LIMITS)
    assert not any(counter.receive(part, 0.0) for part in parts)
    return bytes(counter.forwarded)


def fault(*parts: bytes, now: float = 0.0, limits: FrameLimits = LIMITS) -> str | None:
    """The fault of the first faulty part."""
    counter = FrameCounter(0.0, limits)
    return next((fault for part in parts if (fault := counter.receive(part, now))), None)


FAULTS = {
    "another protocol": (b"GET / HTTP/1.1\r\n", "not HTTP/2"),
    "a preface that ends wrong": (PREFACE[:-1] + b"x", "not HTTP/2"),
    "a long frame": (GREETING + frame(DATA, stream=1, payload=bytes(MAX_FRAME_BYTES + 1)), "16,384 bytes"),
    "long headers": (GREETING + frame(HEADERS, END_HEADERS, 1, bytes(1000)), "headers"),
    "headers without end": (
        GREETING + frame(HEADERS, 0, 1, bytes(100)) + frame(CONTINUATION, 0, 1, bytes(100)) * 9,
        "headers",
    ),
    "a frame of empty messages": (GREETING + frame(DATA, stream=1, payload=bytes(5 * 80)), "carry nothing"),
    "empty headers without end": (GREETING + frame(HEADERS, 0, 1) * 200, "carry nothing"),
    "continuations without end": (GREETING + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 50, "carry nothing"),
    **{
        f"frames of kind {kind}, flags {flags}, {size} bytes": (
            GREETING + frame(kind, flags, 1, bytes(size)) * 80,
            "carry nothing",
        )
        for kind, flags, size in [
            (PING, 0, 8),
            (PING, ACK, 8),
            (SETTINGS, 0, 0),
            (SETTINGS, ACK, 0),
            (RST_STREAM, 0, 4),
            (PRIORITY, 0, 5),
            (GOAWAY, 0, 8),
            (WINDOW_UPDATE, 0, 4),
            (DATA, 0, 0),
            (DATA, 0, 1),
            (HEADERS, END_HEADERS, 0),
            (HEADERS, END_HEADERS, 900),
            (99, 0, 0),
        ]
    },
}
PASSING = {
    "nothing": b"",
    "half a preface": PREFACE[:10],
    "half a frame": GREETING + frame(PING)[:5],
    "many small frames": GREETING + frame(PING, payload=bytes(8)) * 19,
    "the largest frames": GREETING + frame(DATA, 0, 1, b"\xff" * MAX_FRAME_BYTES) * 30,  # of a message of 4 GB
    "messages within a frame": GREETING + frame(DATA, 0, 1, bytes(5 * 70)),
    "many calls": GREETING + frame(HEADERS, END_HEADERS, 1, bytes(900)) * 38,
    "long headers": GREETING + frame(HEADERS, 0, 1, bytes(900)) + frame(CONTINUATION, END_HEADERS, 1, bytes(82)),
}


@pytest.mark.parametrize("case", FAULTS)
def test_bytes_above_a_limit_are_faulty(case: str) -> None:
    data, cause = FAULTS[case]
    assert cause in (fault(data) or "")


@pytest.mark.parametrize("case", PASSING)
def test_bytes_within_the_limits_are_not_faulty(case: str) -> None:
    assert fault(PASSING[case]) is None


@given(data=st.data(), case=st.sampled_from([*FAULTS, *(f"passing {case}" for case in PASSING)]))
def test_verdict_does_not_depend_on_cuts(data: st.DataObject, case: str) -> None:
    sent = FAULTS[case][0] if case in FAULTS else PASSING[case.removeprefix("passing ")]
    cuts = sorted(data.draw(st.lists(st.integers(0, min(len(sent), 2000)), max_size=30)))
    assert fault(*(sent[begin:end] for begin, end in pairwise([0, *cuts, len(sent)]))) == fault(sent)


@given(
    frames=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.binary(max_size=100)), max_size=60),
    size=st.integers(1, 50),
)
def test_verdict_on_any_frames_does_not_depend_on_piece_size(frames: list[tuple[int, int, bytes]], size: int) -> None:
    sent = GREETING + b"".join(frame(kind, flags, 1, payload) for kind, flags, payload in frames)
    assert fault(*(sent[begin : begin + size] for begin in range(0, len(sent), size))) == fault(sent)


def test_allowance_for_small_frames_returns_with_time() -> None:
    counter = FrameCounter(0.0, LIMITS)
    assert counter.receive(GREETING + SMALL_PING * 19, 0.0) is None
    assert counter.receive(SMALL_PING * 5, 1.0) is None
    assert TOO_MANY in str(counter.receive(SMALL_PING, 1.0))


WIDENED = frame(WINDOW_UPDATE, payload=bytes(4))
END_OF_MESSAGE = frame(DATA, END_STREAM, 1, bytes(5))
CALL = frame(HEADERS, END_HEADERS, 1, bytes(20)) + END_OF_MESSAGE + WIDENED
SHORTEST_ANSWER = frame(HEADERS, END_HEADERS, 1, bytes(4)) + END_OF_MESSAGE + frame(HEADERS, END_STREAM, 1, bytes(4))
# Frames of a client, the bytes that the server answers each time, and whether this may go on without end.
EXCHANGES = {
    "a message of 80 bytes in a stream of tokens": (SMALL_PING + WIDENED, 80, True),
    "the shortest call of grpcio's client": (CALL, len(SHORTEST_ANSWER), True),
    "pings": (SMALL_PING, len(frame(PING, ACK, payload=bytes(8))), False),
    # grpcio resets streams with empty headers and streams above their maximum number.
    "streams that are reset": (frame(HEADERS, END_HEADERS, 1), len(frame(RST_STREAM, 0, 1, bytes(4))), False),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_answers_of_calls_earn_allowance_and_others_do_not(case: str) -> None:
    sent, num_answered, may_go_on = EXCHANGES[case]
    counter, num_rounds = FrameCounter(0.0, LIMITS), 0
    counter.receive(GREETING, 0.0)
    while (fault := counter.receive(sent, 0.0)) is None and num_rounds < 1000:
        counter.answer(num_answered)
        num_rounds += 1
    assert (fault is None) is may_go_on, fault
    assert may_go_on or TOO_MANY in str(fault)


def test_rest_of_a_message_of_an_ended_call_is_no_messages() -> None:
    """The server may refuse a call before its message has arrived: the connection's other calls go on."""
    counter = FrameCounter(0.0, LIMITS)
    begin = frame(DATA, stream=1, payload=b"\0" + (5 * 200).to_bytes(4) + bytes(500))
    assert counter.receive(GREETING + frame(HEADERS, END_HEADERS, 1, bytes(20)) + begin, 0.0) is None
    counter.forget(1)
    for stream in range(3, 3 + 2 * (LIMITS.calls - 1), 2):
        counter.messages(stream)
    assert counter.receive(frame(DATA, stream=1, payload=bytes(500)), 0.0) is None
    counter.forget(1)
    assert counter.receive(frame(DATA, stream=1, payload=bytes(5)) * 5, 0.0) is None
    assert TOO_MANY in str(counter.receive(frame(DATA, stream=1, payload=bytes(5 * 80)), 0.0))


def test_accumulated_allowance_is_bounded() -> None:
    counter = FrameCounter(0.0, LIMITS)
    counter.receive(GREETING, 0.0)
    counter.answer(1 << 30)
    assert TOO_MANY in str(counter.receive(SMALL_PING * 21, 1000.0))


@given(data=st.data())
def test_each_call_gets_the_number_of_its_stream(data: st.DataObject) -> None:
    message = frame(DATA, END_STREAM, 1, b"\0\0\0\0\1x")
    sent = [
        GREETING + frame(HEADERS, END_HEADERS, 1, b"abc") + message,
        frame(HEADERS, 0, 3, b"de") + frame(CONTINUATION, END_HEADERS, 3) + SMALL_PING,
    ]
    expected = (
        GREETING + frame(HEADERS, 0, 1, b"abc") + _number(1) + message,
        frame(HEADERS, 0, 3, b"de") + frame(CONTINUATION, 0, 3) + _number(3) + SMALL_PING,
    )
    whole = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=30)))
    assert sent_on(*(whole[begin:end] for begin, end in pairwise([0, *cuts, len(whole)]))) == b"".join(expected)


def _number(stream: int) -> bytes:
    return frame(CONTINUATION, END_HEADERS, stream, header_block([(STREAM_HEADER, str(stream))]))

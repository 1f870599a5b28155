"""Streams of an answer, and the figures shown below it."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from torchrelay.cli.api.chat_stream import Answer, ChatEvent, parse_event, stream_chat
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import ApiError, Unreachable


def test_answer_streams_text_and_usage(gateway: FakeGateway) -> None:
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        events = list(stream_chat(client, "acme/tiny", [{"role": "user", "content": "hi"}], {"max_tokens": 9}))
    assert events[0].is_waiting
    assert [event.text for event in events if event.text] == list(gateway.pieces)  # U+2028 does not break a line
    assert events[-1].num_output_tokens == 3
    body = gateway.asked[-1][2]
    assert (body["stream"], body["max_tokens"], body["messages"][0]["content"]) == (True, 9, "hi")


def test_interrupted_answer_is_error(gateway: FakeGateway) -> None:
    gateway.hang_after_pieces = True
    gateway.released.set()
    with GatewayClient(gateway.url, TENANT_KEY) as client, pytest.raises(Unreachable, match="ended early"):
        list(stream_chat(client, "acme/tiny", [], {}))


def test_closing_events_ends_call(gateway: FakeGateway) -> None:
    gateway.hang_after_pieces = True
    with GatewayClient(gateway.url, TENANT_KEY) as client, closing(stream_chat(client, "acme/tiny", [], {})) as events:
        assert next(event.text for event in events if event.text) == "Hel"


def test_stream_error_is_raised() -> None:
    with pytest.raises(ApiError, match="worker was lost"):
        parse_event(b'data: {"error": {"message": "the worker was lost", "code": "unavailable"}}')
    assert parse_event(b"") is None
    assert parse_event(b"event: ping") is None


def test_answer_shows_rate_and_times() -> None:
    times = iter([10.0, 10.25, 10.75])  # asked, first piece, last piece
    answer = Answer(lambda: next(times))
    answer.add(ChatEvent(is_waiting=True))
    assert answer.summary() == ""  # nothing is known yet
    answer.add(ChatEvent("req-1", "Hel"))
    assert answer.summary() == "first token after 250 ms · req-1"
    answer.add(ChatEvent("req-1", "lo"))
    answer.add(ChatEvent("req-1", finish="length", num_output_tokens=11))
    assert (answer.ttft_s, answer.tokens_per_s, answer.text) == (0.25, 20.0, "Hello")
    assert answer.summary() == "first token after 250 ms · 11 tokens · 20 tokens/s · cut off at max_tokens · req-1"


def test_tokens_that_arrive_together_have_no_rate() -> None:
    times = iter([10.0, 10.25, 10.2504])
    answer = Answer(lambda: next(times))
    for event in (ChatEvent("req-1", "Hel"), ChatEvent("req-1", "lo"), ChatEvent("req-1", num_output_tokens=11)):
        answer.add(event)
    assert answer.summary() == "first token after 250 ms · 11 tokens · req-1"

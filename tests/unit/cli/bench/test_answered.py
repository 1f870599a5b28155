"""Times and tokens of a streamed answer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from torchrelay.cli.bench.answered import Answered, AnswerStream
from torchrelay.cli.errors import ApiError


def event(*tokens: int, **fields: object) -> bytes:
    body = {"choices": [{"index": 0, "token_ids": list(tokens)}], "usage": None, **fields}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def test_tokens_of_one_read_share_its_time() -> None:
    stream = AnswerStream()
    stream.feed(b": waiting\n\n", 0.5)
    assert stream.num_tokens == 0
    stream.feed(event(1), 1.0)
    stream.feed(event(2) + event(3)[:10], 1.2)
    stream.feed(event(3)[10:] + event(4), 1.4)
    stream.feed(event(choices=[], usage={"prompt_tokens": 7}) + b"data: [DONE]\n\n", 1.5)
    assert (stream.first_s, stream.last_s, stream.num_tokens) == (1.0, 1.4, 4)
    assert stream.gaps_s == pytest.approx([0.2, 0.1, 0.1])
    assert stream.usage == {"prompt_tokens": 7} and stream.fault(4) == ""


def test_what_an_answer_lacks_is_a_fault() -> None:
    stream = AnswerStream()
    stream.feed(event(1, 2), 1.0)
    assert stream.gaps_s == [0.0]
    assert stream.fault(2) == "the stream ended early"
    stream.feed(b"data: [DONE]\n\n", 1.0)
    assert stream.fault(3) == "an answer had 2 tokens instead of 3"


def test_error_within_a_stream_is_raised() -> None:
    with pytest.raises(ApiError, match="the worker is gone"):
        AnswerStream().feed(b'data: {"error": {"message": "the worker is gone"}}\n\n', 1.0)


def test_first_token_counts_from_when_the_request_was_due() -> None:
    answered = Answered(1.0, 1.25, 3.0, first_s=1.5, last_s=2.5, num_output_tokens=5)
    assert (answered.ttft_s, answered.tpot_s) == (0.5, 0.25)
    assert replace(answered, num_output_tokens=1).tpot_s == 0.0
    assert Answered(1.0, 1.0, 2.0).ttft_s is None

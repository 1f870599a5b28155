"""OpenAI's paths over HTTP: bodies, headers and errors, how answers are written, how they wait and end, their bills."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from tests.support.gateway_ports import KEY
from tests.support.sample_tokenizers import PANIC, panicking_tokenizer
from tests.support.wait import eventually
from tests.unit.gateway.dialects.openai.test_completions import events_of
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    QueueFull,
    TorchrelayError,
    Unauthenticated,
    Unavailable,
    UploadRefused,
)
from torchrelay.control.v1.scheduler_pb2 import Loading
from torchrelay.gateway.core import FinishCause, RateLeft, RatesLeft
from torchrelay.gateway.exchange.errors import error_body, error_headers
from torchrelay.gateway.exchange.sse import data_event
from torchrelay.gateway.limits.refusals import RateExceeded

BODY: dict[str, Any] = {"model": "echo", "prompt": PROMPT, "max_tokens": 3}
STREAM = {**BODY, "stream": True}


def test_errors_have_openais_shape() -> None:
    for error, kind, code in (
        (InvalidRequest("no", field="n"), "invalid_request_error", "invalid_request"),
        (ContextLengthExceeded("no", field="n"), "invalid_request_error", "context_length_exceeded"),
        (UploadRefused("no", field="n"), "invalid_request_error", "upload_refused"),
        (NotFound("no", field="n"), "not_found_error", "not_found"),
        (QueueFull("no", field="n"), "rate_limit_error", "queue_full"),
        (TorchrelayError("no", field="n"), "api_error", "internal"),
    ):
        assert error_body(error) == {"error": {"message": "no", "type": kind, "param": "n", "code": code}}


def test_errors_have_retry_authenticate_and_rate_headers() -> None:
    rate = [f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")]
    exceeded = RateExceeded("no", RatesLeft(RateLeft(per_minute=30, num_left=0.25)), retry_after_s=1.5)
    for error, headers in (
        (QueueFull("no", retry_after_s=1.2), {"retry-after": "2"}),
        (QueueFull("no", retry_after_s=0), {"retry-after": "1"}),
        (Unavailable("no"), {}),
        (Unauthenticated("no"), {"www-authenticate": "Bearer"}),
        (exceeded, {"retry-after": "2"} | dict(zip(rate, ("30", "0", "59.500s"), strict=True))),
    ):
        assert error_headers(error) == headers


def test_line_ends_of_unicode_are_escaped() -> None:
    text = "a\u2028b\u2029c\u0085d é ☃ \u2027"
    event = data_event({"text": text})
    assert event.decode().splitlines() == [event.decode().strip(), ""]
    assert json.loads(event.removeprefix(b"data: "))["text"] == text
    assert "é ☃" in event.decode()


async def written(rig: TokenPathRig, num_tokens: int) -> list[bytes]:
    """The writes of a stream without an HTTP server in between."""
    asked = [{"type": "http.request", "body": json.dumps({**STREAM, "max_tokens": num_tokens}).encode()}]
    writes: list[bytes] = []

    async def receive() -> Message:
        return asked.pop() if asked else await asyncio.Future()

    async def send(message: Message) -> None:
        writes.append(message.get("body", b""))

    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await rig.token_path.apps["/v1/completions"](scope, receive, send)
    return writes


async def test_tokens_of_a_fast_stream_are_written_together_and_its_end_at_once(make_rig: MakeRig) -> None:
    rig = await make_rig(write_gap_s=600.0)  # longer than a test may take
    writes = await written(rig, 100)
    assert len(events_of(b"".join(writes).decode())) == 100 + 1
    assert len(writes) < 50


async def test_comments_tell_how_long_a_load_takes(make_rig: MakeRig) -> None:
    rig = await make_rig(keep_alive_s=0.05)
    rig.scheduler.open_gate.clear()
    async with rig.http.stream("POST", "/v1/completions", json={**STREAM, "max_tokens": 4}) as response:
        lines = (line async for line in response.aiter_lines() if line)
        assert await anext(lines) == ": waiting"
        version = rig.scheduler.admits[0].version
        other = Loading(version_id="other", has_slot=True, num_layers=4, left_s=9.0)
        await rig.scheduler.tell(other)
        await rig.scheduler.tell(Loading(version_id=version.version_id, left_s=12.4))
        waits = f": {version.model} waits for a slot, and then about 12 s to load"
        assert await first_of(lines, beside=": waiting") == waits
        loads = Loading(version_id=version.version_id, has_slot=True, num_layers_ready=3, num_layers=32, left_s=60.0)
        await rig.scheduler.tell(loads)
        assert await first_of(lines, beside=waits) == f": loading {version.model}, 3 of 32 layers, about 60 s left"
        rig.workers[0].pause_at = 1
        rig.scheduler.open_gate.set()
        rest: list[str] = []
        async for line in lines:
            rest.append(line)
            if line == ": waiting":  # beside an answer that pauses
                rig.workers[0].resume()
    tokens = [place for place, line in enumerate(rest) if line.startswith("data: ")]
    assert len(tokens) == 4 + 1 + 1
    assert all(line.startswith(": loading") for line in rest[: tokens[0]])
    assert not any(line.startswith(": loading") for line in rest[tokens[0] :])


async def first_of(lines: AsyncIterator[str], beside: str) -> str:
    """The first line other than ``beside``."""
    async for line in lines:
        if line != beside:
            return line
    raise AssertionError("the stream ended")


async def test_drain_waits_then_ends_the_rest_with_an_error(rig: TokenPathRig) -> None:
    rig.workers[0].pause_at = 2
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=STREAM))
    await eventually(lambda: rig.num_accepted() == [2])
    draining = asyncio.ensure_future(rig.token_path.pipeline.drain(60, 60))
    await asyncio.sleep(0)
    rig.workers[0].resume()
    await draining
    assert (await asking).text.endswith("data: [DONE]\n\n")
    rig.scheduler.open_gate.clear()
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=STREAM))
    await eventually(lambda: len(rig.token_path.pipeline.requests) == 1)
    await rig.token_path.pipeline.drain(0.1, 60)
    assert "shutting down" in (await asking).text and len(rig.token_path.pipeline.requests) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_tokenizer_panic_ends_the_answer_with_the_cause(make_rig: MakeRig, stream: bool) -> None:
    """The panic is no ``Exception``. Accepted tokens are billed, workers are freed, and the next request runs."""
    rig = await make_rig(tokenizer=panicking_tokenizer())
    panic = rig.tokenizer.token_to_id(PANIC)
    assert panic is not None
    for worker in rig.workers:
        worker.pause_at = 5
    body = {**BODY, "prompt": [*PROMPT[:4], panic, *PROMPT], "max_tokens": 100, "stream": stream}
    response = await rig.http.post("/v1/completions", json=body)
    assert response.status_code == (200 if stream else 500)
    cause = "the model's tokenizer failed to decode its tokens; the answer cannot go on"
    assert json.loads(response.text.split("data: ")[-1])["error"]["message"] == cause
    await eventually(lambda: len(rig.ports.settled) == 1 and not rig.ports.reserved)
    usage = next(iter(rig.ports.settled.values()))[0]
    assert (usage.num_output_tokens, usage.cause) == (5, FinishCause.ERROR)
    await eventually(lambda: not any(worker.num_running for worker in rig.workers))
    await eventually(lambda: len(rig.scheduler.releases) == 1)
    reply = (await rig.http.post("/v1/completions", json=BODY)).json()
    assert reply["choices"][0]["text"] == rig.text(PROMPT[:3])


async def test_tokens_wait_for_the_commit_of_the_row(rig: TokenPathRig) -> None:
    rig.ports.may_open.clear()
    async with rig.http.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.aiter_lines()
        await eventually(lambda: len(rig.scheduler.releases) == 1)  # all tokens have arrived
        assert not rig.ports.opened
        rig.ports.may_open.set()
        assert [line async for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    assert rig.ports.opened


@pytest.mark.parametrize(
    ("error", "is_late", "status", "said"),
    [
        (Unavailable("the database is away"), False, 503, "the database is away"),
        (Unavailable("the connection broke at the commit"), True, 503, "the connection broke"),
        (RuntimeError("deadlock detected"), False, 500, "internal error"),
    ],
)
async def test_request_without_a_row_fails_and_costs_nothing(
    rig: TokenPathRig, error: Exception, is_late: bool, status: int, said: str
) -> None:
    """The row of an unanswered commit is settled empty: the sweep would bill what the client never received."""
    rig.ports.open_error, rig.ports.is_open_error_late = error, is_late
    response = await rig.http.post("/v1/completions", json=BODY)
    assert (response.status_code, said in response.json()["error"]["message"]) == (status, True)
    await eventually(lambda: not rig.ports.reserved)
    assert [*rig.ports.settled.values()] == [[]] * is_late and [*rig.ports.released.values()] == [0]


async def test_settlement_is_retried_until_it_succeeds(rig: TokenPathRig) -> None:
    rig.ports.settle_errors = [Unavailable("locked"), RuntimeError("deadlock detected"), Unavailable("locked")]
    reply = (await rig.http.post("/v1/completions", json=BODY)).json()
    await eventually(lambda: rig.ports.released)
    assert rig.ports.settled[reply["id"]][0].num_output_tokens == 3
    assert [*rig.ports.released.values()] == [3]

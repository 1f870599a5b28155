"""How REST requests wait and end: cold model, drain, disconnect, failing ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest

from tests.support.sample_tokenizers import PANIC, panicking_tokenizer
from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import Unavailable
from torchrelay.control.v1.scheduler_pb2 import Loading
from torchrelay.gateway.core import FinishCause


async def test_waiting_stream_gets_headers_and_comments_first(make_rig: MakeRig) -> None:
    rig = await make_rig(keep_alive_s=0.05)
    rig.scheduler.open_gate.clear()
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    async with rig.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert await anext(lines) == ": waiting"
        assert await anext(lines) == ""
        assert await anext(lines) == ": waiting"
        rig.scheduler.open_gate.set()
        rest = [line async for line in lines if line.startswith("data: ")]
    assert len(rest) == 4 + 1 + 1


async def test_comments_tell_how_long_a_load_takes(make_rig: MakeRig) -> None:
    rig = await make_rig(keep_alive_s=0.05)
    rig.scheduler.open_gate.clear()
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    async with rig.http.stream("POST", "/v1/completions", json=body) as response:
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


async def test_error_after_the_headers_is_an_event(make_rig: MakeRig) -> None:
    rig = await make_rig(keep_alive_s=0.05)
    rig.scheduler.open_gate.clear()
    stream = await rig.client.completions.create(model="echo", prompt=PROMPT, max_tokens=4, stream=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.token_path.pipeline.stop_all(5))
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
    await eventually(lambda: len(rig.scheduler.withdrawals) == 1)
    assert not rig.ports.reserved


async def test_drain_waits_then_ends_the_rest_with_an_error(rig: TokenPathRig) -> None:
    rig.workers[0].pause_at = 2
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
    await eventually(lambda: rig.num_accepted() == [2])
    draining = asyncio.ensure_future(rig.token_path.pipeline.drain(5, 5))
    await asyncio.sleep(0)
    rig.workers[0].resume()
    await draining
    assert (await asking).text.endswith("data: [DONE]\n\n")
    rig.scheduler.open_gate.clear()
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
    await eventually(lambda: len(rig.token_path.pipeline.requests) == 1)
    await rig.token_path.pipeline.drain(0.5, 5)
    assert "shutting down" in (await asking).text and len(rig.token_path.pipeline.requests) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_is_billed_for_accepted_tokens(rig: TokenPathRig, stream: bool) -> None:
    for worker in rig.workers:
        worker.pause_at = 5
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 100, "stream": stream}
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
    await eventually(lambda: rig.workers[0].num_running == 1)
    await eventually(lambda: bool(rig.ports.opened))
    request_id = rig.ports.opened[0].request_id
    await eventually(lambda: rig.num_accepted() == [5])
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: rig.workers[0].num_running == 0)
    assert ("decode", (request_id, 1)) in rig.workers[0].cancelled
    await eventually(lambda: request_id in rig.ports.settled and not rig.ports.reserved)
    usage = rig.ports.settled[request_id][0]
    assert (usage.num_output_tokens, usage.cause) == (5, FinishCause.CANCELLED)
    await eventually(lambda: len(rig.scheduler.releases) == 1)
    assert rig.token_path.admissions.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_tokenizer_panic_ends_the_stream_with_the_cause(make_rig: MakeRig, stream: bool) -> None:
    """The panic is no ``Exception``. Accepted tokens are billed, workers are freed, and the next request runs."""
    rig = await make_rig(tokenizer=panicking_tokenizer())
    panic = rig.tokenizer.token_to_id(PANIC)
    assert panic is not None
    for worker in rig.workers:
        worker.pause_at = 5
    body = {"model": "echo", "prompt": [*PROMPT[:4], panic, *PROMPT], "max_tokens": 100, "stream": stream}
    response = await rig.http.post("/v1/completions", json=body)
    cause = "the model's tokenizer failed to decode its tokens; the answer cannot go on"
    if stream:
        assert json.loads(response.text.split("data: ")[-1])["error"]["message"] == cause
    else:
        assert (response.status_code, response.json()["error"]["message"]) == (500, cause)
    await eventually(lambda: len(rig.ports.settled) == 1 and not rig.ports.reserved)
    usage = next(iter(rig.ports.settled.values()))[0]
    assert (usage.num_output_tokens, usage.cause) == (5, FinishCause.ERROR)
    await eventually(lambda: not any(worker.num_running for worker in rig.workers))
    await eventually(lambda: len(rig.scheduler.releases) == 1)
    reply = await rig.client.completions.create(model="echo", prompt=PROMPT, max_tokens=3)
    assert reply.choices[0].text == rig.text(PROMPT[:3])


async def test_waiting_client_that_leaves_is_withdrawn(rig: TokenPathRig) -> None:
    rig.scheduler.open_gate.clear()
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json={"model": "echo", "prompt": "hi"}))
    await eventually(lambda: len(rig.scheduler.admits) == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: len(rig.scheduler.withdrawals) == 1)
    await eventually(lambda: not rig.ports.reserved)
    assert next(iter(rig.ports.settled.values()))[0].num_output_tokens == 0


async def test_tokens_wait_for_the_commit_of_the_row(rig: TokenPathRig) -> None:
    rig.ports.may_open.clear()
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    async with rig.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        await eventually(lambda: len(rig.scheduler.releases) == 1)  # all tokens have arrived
        assert not rig.ports.opened
        rig.ports.may_open.set()
        assert [line async for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    assert rig.ports.opened


async def test_request_without_a_row_fails_and_costs_nothing(rig: TokenPathRig) -> None:
    rig.ports.open_error = Unavailable("the database is away")
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 3})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the database is away")
    await eventually(lambda: not rig.ports.reserved)
    assert not rig.ports.settled
    assert list(rig.ports.released.values()) == [0]


async def test_row_of_an_unanswered_commit_is_settled_empty(rig: TokenPathRig) -> None:
    """Otherwise the sweep would later bill what the client never received."""
    rig.ports.open_error, rig.ports.is_open_error_late = Unavailable("the connection broke at the commit"), True
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 3})
    assert response.status_code == 503
    await eventually(lambda: not rig.ports.reserved)
    assert list(rig.ports.settled.values()) == [[]]
    assert list(rig.ports.released.values()) == [0]


async def test_unknown_ledger_error_ends_the_request(rig: TokenPathRig) -> None:
    rig.ports.open_error = RuntimeError("deadlock detected")
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 3})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    await eventually(lambda: not rig.ports.reserved)


async def test_settlement_is_retried_until_it_succeeds(rig: TokenPathRig) -> None:
    rig.ports.settle_errors = [Unavailable("locked"), RuntimeError("deadlock detected"), Unavailable("locked")]
    reply = await rig.client.completions.create(model="echo", prompt=PROMPT, max_tokens=3)
    await eventually(lambda: rig.ports.released)
    assert rig.ports.settled[reply.id][0].num_output_tokens == 3
    assert list(rig.ports.released.values()) == [3]

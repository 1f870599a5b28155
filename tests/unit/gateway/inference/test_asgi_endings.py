"""How a REST request waits and ends: a cold model, a drain, a client that leaves, a ledger that fails."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.unit.gateway.inference.conftest import PROMPT, MakeWorld, World, until
from torchrelay.common.errors import Unavailable
from torchrelay.gateway.core import Cause


async def test_a_cold_stream_gets_headers_and_comments_then_tokens(make_world: MakeWorld) -> None:
    world = await make_world(keep_alive_s=0.05)
    world.scheduler.open_gate.clear()
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    async with world.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert await anext(lines) == ": waiting"
        assert await anext(lines) == ""
        assert await anext(lines) == ": waiting"
        world.scheduler.open_gate.set()
        rest = [line async for line in lines if line.startswith("data: ")]
    assert len(rest) == 4 + 1 + 1


async def test_an_error_after_the_headers_is_an_event(make_world: MakeWorld) -> None:
    world = await make_world(keep_alive_s=0.05)
    world.scheduler.open_gate.clear()
    stream = await world.client.completions.create(model="echo", prompt=PROMPT, max_tokens=4, stream=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.door.intake.stop_all(5))
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
    await until(lambda: len(world.scheduler.withdrawals) == 1)
    assert not world.doors.reserved


async def test_a_drain_waits_for_who_ends_and_tells_who_does_not(world: World) -> None:
    world.workers[0].pause_at = 2
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    asking = asyncio.ensure_future(world.http.post("/v1/completions", json=body))
    await until(lambda: [one.usage.num_output_tokens for one in world.door.intake._requests] == [2])
    draining = asyncio.ensure_future(world.door.intake.drain(5, 5))
    await asyncio.sleep(0)
    world.workers[0].resume()
    await draining
    assert (await asking).text.endswith("data: [DONE]\n\n")
    world.scheduler.open_gate.clear()
    asking = asyncio.ensure_future(world.http.post("/v1/completions", json=body))
    await until(lambda: world.door.intake.num_running == 1)
    await world.door.intake.drain(0.5, 5)
    assert "shutting down" in (await asking).text and world.door.intake.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_workers_and_is_billed_for_what_was_accepted(
    world: World, stream: bool
) -> None:
    for worker in world.workers:
        worker.pause_at = 5
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 100, "stream": stream}
    asking = asyncio.ensure_future(world.http.post("/v1/completions", json=body))
    await until(lambda: world.workers[0].num_running == 1)
    await until(lambda: bool(world.doors.opened))
    request_id = world.doors.opened[0].request_id
    await until(lambda: [one.usage.num_output_tokens for one in world.door.intake._requests] == [5])
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: world.workers[0].num_running == 0)
    assert ("decode", (request_id, 1)) in world.workers[0].cancelled
    await until(lambda: request_id in world.doors.settled and not world.doors.reserved)
    usage = world.doors.settled[request_id][0]
    assert (usage.num_output_tokens, usage.cause) == (5, Cause.CANCELLED)
    await until(lambda: len(world.scheduler.releases) == 1)
    assert world.door.admissions.num_open == 0


async def test_a_client_that_leaves_while_waiting_is_withdrawn(world: World) -> None:
    world.scheduler.open_gate.clear()
    asking = asyncio.ensure_future(world.http.post("/v1/completions", json={"model": "echo", "prompt": "hi"}))
    await until(lambda: len(world.scheduler.admits) == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: len(world.scheduler.withdrawals) == 1)
    await until(lambda: not world.doors.reserved)
    assert next(iter(world.doors.settled.values()))[0].num_output_tokens == 0


async def test_no_token_is_delivered_before_the_row_is_committed(world: World) -> None:
    world.doors.may_open.clear()
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    async with world.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        await until(lambda: len(world.scheduler.releases) == 1)  # all tokens are there
        assert not world.doors.opened
        world.doors.may_open.set()
        assert [line async for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    assert world.doors.opened


async def test_a_request_whose_row_cannot_be_written_fails_and_costs_nothing(world: World) -> None:
    world.doors.open_error = Unavailable("the database is away")
    response = await world.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 3})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the database is away")
    await until(lambda: not world.doors.reserved)
    assert not world.doors.settled
    assert list(world.doors.released.values()) == [0]


async def test_a_row_whose_answer_got_lost_is_settled_with_nothing(world: World) -> None:
    """Else the sweep would bill one day what the client never saw."""
    world.doors.open_error, world.doors.is_open_error_late = Unavailable("the connection broke at the commit"), True
    response = await world.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 3})
    assert response.status_code == 503
    await until(lambda: not world.doors.reserved)
    assert list(world.doors.settled.values()) == [[]]
    assert list(world.doors.released.values()) == [0]


async def test_a_ledger_that_fails_in_an_unknown_way_ends_the_request(world: World) -> None:
    world.doors.open_error = RuntimeError("deadlock detected")
    response = await world.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 3})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    await until(lambda: not world.doors.reserved)


async def test_a_settlement_is_tried_until_it_succeeds(world: World) -> None:
    world.doors.settle_errors = [Unavailable("locked"), RuntimeError("deadlock detected"), Unavailable("locked")]
    reply = await world.client.completions.create(model="echo", prompt=PROMPT, max_tokens=3)
    assert world.doors.settled[reply.id][0].num_output_tokens == 3
    assert list(world.doors.released.values()) == [3]

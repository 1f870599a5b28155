"""The two REST paths over a real HTTP server, with the official client where it speaks for us."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.unit.gateway.inference.conftest import MakeWorld, World, until
from torchrelay.common.errors import QuotaExceeded, RateLimited, Unavailable
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import Cause

PROMPT = [40, 41, 42, 43, 44, 45, 46]


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended as it should."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_the_official_client_gets_a_whole_chat(world: World) -> None:
    reply = await world.client.chat.completions.create(
        model="acme/echo", messages=[{"role": "user", "content": "hello"}], max_tokens=12, temperature=0
    )
    prompt = world.tokenizer.encode("user: hello\n\nassistant: ", add_special_tokens=False).ids
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == world.text(world.echoed(prompt, 12))
    assert choice.finish_reason == "length"
    assert reply.object == "chat.completion"
    assert reply.model == "acme/echo"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 12)
    assert reply.usage.total_tokens == len(prompt) + 12


async def test_the_official_client_gets_the_same_chat_as_a_stream(world: World) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "größer "}, {"type": "text", "text": "🔥"}]}]
    whole = await world.client.chat.completions.create(model="echo", messages=messages, max_tokens=30)
    stream = await world.client.chat.completions.create(
        model="echo", messages=messages, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == whole.choices[0].message.content
    )
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len(chunks) == 1 + 30 + 1 + 1  # role, tokens, end, usage
    assert all(one.object == "chat.completion.chunk" and one.model == "acme/echo" for one in chunks)


async def test_one_event_per_token_with_its_id(world: World) -> None:
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 20, "stream": True, "return_token_ids": True}
    response = await world.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert {event["id"] for event in events} == {response.headers["x-request-id"]}
    tokens = [event["choices"][0]["token_ids"] for event in events]
    assert tokens == [[token] for token in world.echoed(PROMPT, 20)] + [[]]
    assert events[0]["prompt_token_ids"] == PROMPT
    assert sum("prompt_token_ids" in event for event in events) == 1
    assert "".join(event["choices"][0]["text"] for event in events) == world.text(world.echoed(PROMPT, 20))
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_several_choices_each_have_their_own_stream(world: World) -> None:
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 5, "n": 3, "stream": True, "return_token_ids": True}
    events = events_of((await world.http.post("/v1/completions", json=body)).text)
    for choice in range(3):
        listed = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice]
        assert [token for one in listed for token in one["token_ids"]] == world.echoed(PROMPT, 5, choice)
    whole = await world.client.completions.create(model="echo", prompt=PROMPT, max_tokens=5, n=3)
    assert [one.text for one in whole.choices] == [world.text(world.echoed(PROMPT, 5, choice)) for choice in range(3)]
    assert whole.usage is not None and whole.usage.completion_tokens == 15
    settled = world.doors.settled[whole.id]
    assert [(one.choice, one.num_output_tokens, one.cause) for one in settled] == [
        (choice, 5, Cause.LENGTH) for choice in range(3)
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_and_cuts_the_text(world: World, stream: bool) -> None:
    prompt = [token for word in ("one two ", "ST", "OP", " three") for token in world.tokenizer.encode(word).ids]
    assert not any("STOP" in world.text([token]) for token in prompt)
    body = {"model": "echo", "prompt": prompt, "max_tokens": 50, "stop": [" STOP", "never"], "stream": stream}
    response = await world.http.post("/v1/completions", json=body)
    choices = [event["choices"][0] for event in events_of(response.text)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one two"
    assert choices[-1]["finish_reason"] == "stop"
    num_tokens = world.doors.settled[response.headers["x-request-id"]][0].num_output_tokens
    assert "STOP" in world.text(prompt[:num_tokens]) and "STOP" not in world.text(prompt[: num_tokens - 1])


async def test_the_end_of_sequence_ends_unless_ignored(world: World) -> None:
    eos = world.doors._models["acme/echo"].version.eos_token_ids[0]
    body = {"model": "echo", "prompt": [*PROMPT[:3], eos], "max_tokens": 9, "return_token_ids": True}
    choice = (await world.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [*PROMPT[:3], eos])
    assert choice["text"] == world.text(PROMPT[:3])
    choice = (await world.http.post("/v1/completions", json={**body, "ignore_eos": True})).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 9)


async def test_a_seed_is_drawn_once_or_taken(world: World) -> None:
    world.model.answer = lambda prompt, seed, choice, position: (seed >> position % 8) % 300
    create = world.client.completions.create
    given = [await create(model="echo", prompt=PROMPT, max_tokens=8, seed=7) for _ in range(2)]
    drawn = [await create(model="echo", prompt=PROMPT, max_tokens=8) for _ in range(2)]
    assert given[0].choices[0].text == given[1].choices[0].text
    assert drawn[0].choices[0].text != drawn[1].choices[0].text


BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"model": 3}, "model", "invalid_request"),
    ("completions", {"prompt": None}, "prompt", "invalid_request"),
    ("completions", {"prompt": ""}, "prompt", "invalid_request"),
    ("completions", {"prompt": []}, "prompt", "invalid_request"),
    ("completions", {"prompt": ["a", "b"]}, "prompt", "invalid_request"),
    ("completions", {"prompt": [1 << 19]}, "prompt", "invalid_request"),
    ("completions", {"prompt": [-1]}, "prompt", "invalid_request"),
    ("completions", {"prompt": "a" * 20_000}, "prompt", "context_length_exceeded"),
    ("completions", {"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    ("completions", {"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
    ("completions", {"max_tokens": 0}, "max_tokens", "invalid_request"),
    ("completions", {"max_tokens": "3"}, "max_tokens", "invalid_request"),
    ("completions", {"temperature": 2.5}, "temperature", "invalid_request"),
    ("completions", {"top_p": 0}, "top_p", "invalid_request"),
    ("completions", {"n": 17}, "n", "invalid_request"),
    ("completions", {"stop": ["a"] * 5}, "stop", "invalid_request"),
    ("completions", {"stop": ""}, "stop", "invalid_request"),
    ("completions", {"logprobs": 1}, "logprobs", "invalid_request"),
    ("completions", {"echo": True}, "echo", "invalid_request"),
    ("completions", {"suffix": "x"}, "suffix", "invalid_request"),
    ("completions", {"best_of": 2}, "best_of", "invalid_request"),
    ("completions", {"logit_bias": {"5": 1}}, "logit_bias", "invalid_request"),
    ("completions", {"presence_penalty": 0.5}, "presence_penalty", "invalid_request"),
    ("completions", {"frequency_penalty": 0.5}, "frequency_penalty", "invalid_request"),
    ("chat/completions", {"messages": []}, "messages", "invalid_request"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages", "invalid_request"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "invalid_request",
    ),
    ("chat/completions", {"model": "acme/plain"}, "messages", "invalid_request"),
    ("chat/completions", {"tools": [{}]}, "tools", "invalid_request"),
    ("chat/completions", {"logprobs": True}, "logprobs", "invalid_request"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format", "invalid_request"),
    ("chat/completions", {"max_completion_tokens": 9999}, "max_completion_tokens", "context_length_exceeded"),
]


async def test_bad_fields_are_named(world: World) -> None:
    for path, change, param, code in BAD_FIELDS:
        body = {"model": "acme/echo", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], **change}
        response = await world.http.post(f"/v1/{path}", json=body)
        error = response.json()["error"]
        found = (response.status_code, error["param"], error["code"], error["type"])
        assert found == (400, param, code, "invalid_request_error"), (path, change, error)
        assert response.headers["x-request-id"]
    assert not world.doors.opened and not world.doors.reserved


async def test_other_refusals_have_their_status(world: World) -> None:
    post = world.http.post
    good = {"model": "echo", "prompt": "hi"}
    assert (await post("/v1/completions", content=b"{nonsense")).status_code == 400
    assert (await post("/v1/completions", json=good, headers={"authorization": "Bearer no"})).status_code == 401
    missing = await post("/v1/completions", json={**good, "model": "other/echo"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
    assert (await world.http.get("/v1/completions")).status_code == 405
    assert (await post("/v1/nothing", json=good)).status_code == 404
    large = await post("/v1/completions", content=b" " * (world.door._settings.max_body_bytes + 1))
    assert large.status_code == 400
    world.doors.refusal = RateLimited("too many requests", retry_after_s=7)
    limited = await post("/v1/completions", json=good)
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "7")
    world.doors.refusal = QuotaExceeded("the budget is spent")
    assert (await post("/v1/completions", json=good)).status_code == 403


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(world: World, stream: bool) -> None:
    reason = scheduler_pb2.Refusal.REASON_QUEUE_FULL
    world.scheduler.refusals.append(scheduler_pb2.Refusal(reason=reason, message="50 wait already", retry_after_s=3))
    with pytest.raises(openai.RateLimitError) as caught:
        await world.client.completions.create(model="echo", prompt="hi", stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "queue_full"
    await until(lambda: not world.doors.reserved)


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

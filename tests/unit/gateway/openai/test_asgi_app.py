"""The two token paths over real HTTP, with the official client where possible."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from starlette.types import Message

from tests.support.gateway_ports import ADMIN_KEY, KEY
from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import QuotaExceeded, RateLimited
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import FinishCause, PublishedModel, RequestRate
from torchrelay.gateway.limits.limiter import RequestRateExceeded


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended properly."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_openai_client_gets_a_chat(rig: TokenPathRig) -> None:
    reply = await rig.client.chat.completions.create(
        model="acme/echo", messages=[{"role": "user", "content": "hello"}], max_tokens=12, temperature=0
    )
    prompt = rig.tokenizer.encode("user: hello\n\nassistant: ", add_special_tokens=False).ids
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == rig.text(rig.echoed(prompt, 12))
    assert choice.finish_reason == "length"
    assert reply.object == "chat.completion"
    assert reply.model == "acme/echo"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 12)
    assert reply.usage.total_tokens == len(prompt) + 12


async def test_openai_client_gets_the_same_chat_streamed(rig: TokenPathRig) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "größer "}, {"type": "text", "text": "🔥"}]}]
    whole = await rig.client.chat.completions.create(model="echo", messages=messages, max_tokens=30)
    stream = await rig.client.chat.completions.create(
        model="echo", messages=messages, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len(chunks) == 1 + 30 + 1 + 1  # role, tokens, end, usage
    assert all(chunk.object == "chat.completion.chunk" and chunk.model == "acme/echo" for chunk in chunks)


async def written(rig: TokenPathRig, num_tokens: int) -> list[bytes]:
    """The writes of a stream without an HTTP server in between."""
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": num_tokens, "stream": True}
    asked = [{"type": "http.request", "body": json.dumps(body).encode()}]
    writes: list[bytes] = []

    async def receive() -> Message:
        return asked.pop() if asked else await asyncio.Future()

    async def send(message: Message) -> None:
        writes.append(message.get("body", b""))

    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await rig.token_path.asgi(scope, receive, send)
    return writes


async def test_tokens_of_a_fast_stream_are_written_together(rig: TokenPathRig) -> None:
    writes = await written(rig, 100)
    assert len(events_of(b"".join(writes).decode())) == 100 + 1
    assert len(writes) < 50


async def test_end_of_a_fast_stream_is_written_at_once(make_rig: MakeRig) -> None:
    rig = await make_rig(write_gap_s=60.0)
    async with asyncio.timeout(20):
        writes = await written(rig, 100)
    assert len(events_of(b"".join(writes).decode())) == 100 + 1


async def test_streamed_event_carries_one_token_with_its_id(rig: TokenPathRig) -> None:
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 20, "stream": True, "return_token_ids": True}
    response = await rig.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert {event["id"] for event in events} == {response.headers["x-request-id"]}
    tokens = [event["choices"][0]["token_ids"] for event in events]
    assert tokens == [[token] for token in rig.echoed(PROMPT, 20)] + [[]]
    assert events[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert sum("prompt_token_ids" in event["choices"][0] for event in events) == 1
    assert "".join(event["choices"][0]["text"] for event in events) == rig.text(rig.echoed(PROMPT, 20))
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_choices_have_their_own_tokens(rig: TokenPathRig) -> None:
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 5, "n": 3, "stream": True, "return_token_ids": True}
    events = events_of((await rig.http.post("/v1/completions", json=body)).text)
    for choice in range(3):
        listed = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice]
        assert [token for event_choice in listed for token in event_choice["token_ids"]] == rig.echoed(
            PROMPT, 5, choice
        )
    whole = await rig.client.completions.create(model="echo", prompt=PROMPT, max_tokens=5, n=3)
    assert [each.text for each in whole.choices] == [rig.text(rig.echoed(PROMPT, 5, choice)) for choice in range(3)]
    assert whole.usage is not None and whole.usage.completion_tokens == 15
    settled = rig.ports.settled[whole.id]
    assert [(usage.choice, usage.num_output_tokens, usage.cause) for usage in settled] == [
        (choice, 5, FinishCause.LENGTH) for choice in range(3)
    ]


async def test_ids_of_the_prompt_are_where_vllm_has_them(rig: TokenPathRig) -> None:
    """Within each choice of a completion, beside the choices of a chat."""
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 3, "n": 2, "return_token_ids": True}
    whole = (await rig.http.post("/v1/completions", json=body)).json()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [PROMPT] * 2
    assert "prompt_token_ids" not in whole
    events = events_of((await rig.http.post("/v1/completions", json={**body, "stream": True})).text)
    shown = [(choice["index"], choice.get("prompt_token_ids")) for event in events for choice in event["choices"]]
    assert sorted(each for each in shown if each[1] is not None) == [(0, PROMPT), (1, PROMPT)]
    assert dict(reversed(shown)) == {0: PROMPT, 1: PROMPT}, "it comes with the first event"

    talk = {**body, "messages": [{"role": "user", "content": "hello"}]}
    prompt = rig.tokenizer.encode("user: hello\n\nassistant: ", add_special_tokens=False).ids
    whole = (await rig.http.post("/v1/chat/completions", json=talk)).json()
    assert whole["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in choice for choice in whole["choices"])
    events = events_of((await rig.http.post("/v1/chat/completions", json={**talk, "stream": True})).text)
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    assert not any("prompt_token_ids" in choice for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens_cuts_the_text(rig: TokenPathRig, stream: bool) -> None:
    prompt = [token for word in ("one two ", "ST", "OP", " three") for token in rig.tokenizer.encode(word).ids]
    assert not any("STOP" in rig.text([token]) for token in prompt)
    body = {"model": "echo", "prompt": prompt, "max_tokens": 50, "stop": [" STOP", "never"], "stream": stream}
    response = await rig.http.post("/v1/completions", json=body)
    choices = [event["choices"][0] for event in events_of(response.text)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one two"
    assert choices[-1]["finish_reason"] == "stop"
    num_tokens = rig.ports.settled[response.headers["x-request-id"]][0].num_output_tokens
    assert "STOP" in rig.text(prompt[:num_tokens]) and "STOP" not in rig.text(prompt[: num_tokens - 1])


async def test_end_of_sequence_ends_unless_ignored(rig: TokenPathRig) -> None:
    eos = rig.ports.published["acme/echo"].version.eos_token_ids[0]
    body = {"model": "echo", "prompt": [*PROMPT[:3], eos], "max_tokens": 9, "return_token_ids": True}
    choice = (await rig.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [*PROMPT[:3], eos])
    assert choice["text"] == rig.text(PROMPT[:3])
    choice = (await rig.http.post("/v1/completions", json={**body, "ignore_eos": True})).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 9)


async def test_own_stop_tokens_apply_with_ignore_eos(rig: TokenPathRig) -> None:
    for ignore_eos in (False, True):
        body = {"model": "echo", "prompt": PROMPT, "max_tokens": 9, "return_token_ids": True, "ignore_eos": ignore_eos}
        response = await rig.http.post("/v1/completions", json={**body, "stop_token_ids": [PROMPT[4], 3]})
        choice = response.json()["choices"][0]
        assert (choice["finish_reason"], choice["token_ids"]) == ("stop", PROMPT[:5])
        assert choice["text"] == rig.text(PROMPT[:4]), "the token that ends an answer leaves no text"


async def test_absent_stop_string_leaves_the_whole_text(rig: TokenPathRig) -> None:
    for stop in ("zzz", rig.text(PROMPT[:1]) + "never", ["a" * 512, "\u00e9"]):
        body = {"model": "echo", "prompt": PROMPT, "max_tokens": 20, "stop": stop}
        choice = (await rig.http.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["finish_reason"], choice["text"]) == ("length", rig.text(rig.echoed(PROMPT, 20)))


async def test_text_with_a_token_beyond_the_vocabulary_is_refused(rig: TokenPathRig) -> None:
    rig.ports.published["acme/echo"] = replace_vocab_size(rig.ports.published["acme/echo"], 40)
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": "torch"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert "the model's token ids are 0 to 39" in error["message"]


def replace_vocab_size(model: PublishedModel, vocab_size: int) -> PublishedModel:
    version = replace(model.version, shape=replace(model.version.shape, vocab_size=vocab_size))
    return replace(model, version=version)


async def test_seed_is_used_or_drawn_per_request(rig: TokenPathRig) -> None:
    rig.model.answer = lambda prompt, seed, choice, position: (seed >> position % 8) % 300
    create = rig.client.completions.create
    given = [await create(model="echo", prompt=PROMPT, max_tokens=8, seed=7) for _ in range(2)]
    drawn = [await create(model="echo", prompt=PROMPT, max_tokens=8) for _ in range(2)]
    assert given[0].choices[0].text == given[1].choices[0].text
    assert drawn[0].choices[0].text != drawn[1].choices[0].text


BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"model": 3}, "model", "invalid_request"),
    ("completions", {"prompt": None}, "prompt", "invalid_request"),
    ("completions", {"prompt": ""}, "prompt", "invalid_request"),
    ("completions", {"prompt": []}, "prompt", "invalid_request"),
    ("completions", {"prompt": ["a", 5]}, "prompt", "invalid_request"),
    ("completions", {"prompt": [1 << 19]}, "prompt", "invalid_request"),
    ("completions", {"prompt": [-1]}, "prompt", "invalid_request"),
    ("completions", {"prompt": "a" * 20_000}, "prompt", "context_length_exceeded"),
    ("completions", {"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    ("completions", {"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
    ("completions", {"max_tokens": 0}, "max_tokens", "invalid_request"),
    ("completions", {"max_tokens": "3"}, "max_tokens", "invalid_request"),
    ("completions", {"n": 17}, "n", "invalid_request"),
    ("completions", {"stop": ["a"] * 5}, "stop", "invalid_request"),
    ("completions", {"stop": ""}, "stop", "invalid_request"),
    ("completions", {"echo": True, "logprobs": 0}, "logprobs", "invalid_request"),
    ("completions", {"suffix": "x"}, "suffix", "invalid_request"),
    ("completions", {"best_of": 2, "n": 3}, "best_of", "invalid_request"),
    ("completions", {"best_of": 17}, "best_of", "invalid_request"),
    ("completions", {"best_of": 2, "stream": True}, "best_of", "invalid_request"),
    ("completions", {"logit_bias": {"99999": 1}}, "logit_bias", "invalid_request"),
    ("completions", {"stop_token_ids": [99999]}, "stop_token_ids", "invalid_request"),
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
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format", "invalid_request"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format", "invalid_request"),
    ("chat/completions", {"guided_regex": "("}, "guided_regex", "invalid_request"),
    ("chat/completions", {"guided_regex": ""}, "guided_regex", "invalid_request"),
    ("chat/completions", {"guided_regex": "a" * 600_000}, "guided_regex", "invalid_request"),
    ("completions", {"structured_outputs": {"choice": []}}, "structured_outputs", "invalid_request"),
    ("completions", {"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_request"),
    ("completions", {"guided_json": "{"}, "guided_json", "invalid_request"),
    ("completions", {"prompt": [1], "guided_grammar": "start: x"}, "guided_grammar", "invalid_request"),
    ("chat/completions", {"max_completion_tokens": 9999}, "max_completion_tokens", "context_length_exceeded"),
]


async def test_invalid_fields_are_named(rig: TokenPathRig) -> None:
    for path, change, param, code in BAD_FIELDS:
        body = {"model": "acme/echo", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], **change}
        response = await rig.http.post(f"/v1/{path}", json=body)
        error = response.json()["error"]
        refusal = (response.status_code, error["param"], error["code"], error["type"])
        assert refusal == (400, param, code, "invalid_request_error"), (path, change, error)
        assert response.headers["x-request-id"]
    assert not rig.ports.opened and not rig.ports.reserved


async def test_body_other_than_json_is_refused_by_name(rig: TokenPathRig) -> None:
    body = json.dumps({"model": "echo", "prompt": PROMPT, "messages": [{"role": "user", "content": "hi"}]}).encode()
    for path in ("completions", "chat/completions"):
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            refused = await rig.http.post(f"/v1/{path}", content=body, headers={"Content-Type": content_type})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["type"]) == (
                415,
                "Content-Type",
                "invalid_request_error",
            )
        for headers in ({}, {"Content-Type": "application/json;charset=UTF-8"}):
            assert (await rig.http.post(f"/v1/{path}", content=body, headers=headers)).status_code == 200


async def test_compressed_body_is_refused_by_name(rig: TokenPathRig) -> None:
    body = gzip.compress(b'{"model": "echo", "prompt": [1]}')
    for path in ("completions", "chat/completions"):
        response = await rig.http.post(f"/v1/{path}", content=body, headers={"Content-Encoding": "gzip"})
        assert response.status_code == 415
        error = response.json()["error"]
        assert error["message"] == "Content-Encoding 'gzip' is not supported: send the body without compression"
        assert error["param"] == "Content-Encoding"


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_tell_their_time_and_what_is_left_of_the_rate(rig: TokenPathRig, stream: bool) -> None:
    names = [f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")]
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 2, "stream": stream}
    unlimited = await rig.http.post("/v1/completions", json=body)
    assert not set(names) & set(unlimited.headers)
    rig.ports.rate = RequestRate(per_minute=60, num_left=57.5)
    limited = await rig.http.post("/v1/completions", json=body)
    assert [limited.headers[name] for name in names] == ["60", "57", "2.500s"]
    rig.ports.refusal = RequestRateExceeded(RequestRate(per_minute=60, num_left=0), retry_after_s=1)
    refused = await rig.http.post("/v1/completions", json=body)
    assert [refused.headers[name] for name in ("retry-after", *names)] == ["1", "60", "0", "60.000s"]
    invalid = await rig.http.post("/v1/completions", json={**body, "n": 0})
    assert [each.status_code for each in (unlimited, limited, refused, invalid)] == [200, 200, 429, 400]
    for each in (unlimited, limited, refused, invalid):
        assert int(each.headers["openai-processing-ms"]) <= 60_000


async def test_other_refusals_have_their_status(rig: TokenPathRig) -> None:
    post = rig.http.post
    good = {"model": "echo", "prompt": "hi"}
    assert (await post("/v1/completions", content=b"{nonsense")).status_code == 400
    assert (await post("/v1/completions", json=good, headers={"authorization": "Bearer no"})).status_code == 401
    for model in ("echo", "acme/echo"):  # not 404 for an existing model
        refused = await post(
            "/v1/completions", json={**good, "model": model}, headers={"authorization": f"Bearer {ADMIN_KEY}"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    missing = await post("/v1/completions", json={**good, "model": "other/echo"})
    error = missing.json()["error"]
    assert missing.status_code == 404
    assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "model_not_found")
    got = await rig.http.get("/v1/completions")
    assert (got.status_code, got.json()["error"]["code"], got.headers["allow"]) == (405, "method_not_allowed", "POST")
    for method in ("GET", "PUT", "DELETE"):  # only tenants learn the allowed methods
        keyless = await rig.http.request(method, "/v1/completions", headers={"authorization": ""})
        assert (keyless.status_code, keyless.headers["www-authenticate"]) == (401, "Bearer")
    large = await post("/v1/completions", content=b" " * (rig.settings.max_body_bytes + 1))
    error = large.json()["error"]
    assert (large.status_code, error["type"], error["code"]) == (413, "invalid_request_error", "invalid_request")
    assert large.headers["x-request-id"] and f"{rig.settings.max_body_bytes:,}" in error["message"]
    rig.ports.refusal = RateLimited("too many requests", retry_after_s=7)
    limited = await post("/v1/completions", json=good)
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "7")
    rig.ports.refusal = QuotaExceeded("the budget is spent")
    assert (await post("/v1/completions", json=good)).status_code == 403


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_load_is_unavailable_with_retry_after(rig: TokenPathRig, stream: bool) -> None:
    reason = scheduler_pb2.Refusal.REASON_LOAD_FAILED
    rig.scheduler.refusals.append(scheduler_pb2.Refusal(reason=reason, message="no load", retry_after_s=4.2))
    body = {"model": "echo", "prompt": "hi", "stream": stream}
    reply = await rig.http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert reply.json()["error"]["code"] == "unavailable"
    await eventually(lambda: not rig.ports.reserved)


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_too_many_requests_with_retry_after(rig: TokenPathRig, stream: bool) -> None:
    reason = scheduler_pb2.Refusal.REASON_QUEUE_FULL
    rig.scheduler.refusals.append(scheduler_pb2.Refusal(reason=reason, message="50 wait already", retry_after_s=3))
    with pytest.raises(openai.RateLimitError) as caught:
        await rig.client.completions.create(model="echo", prompt="hi", stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "queue_full"
    await eventually(lambda: not rig.ports.reserved)


async def test_answer_without_limit_ends_with_budget(rig: TokenPathRig) -> None:
    rig.ports.max_output_tokens = 7
    for num_choices, num_tokens in ((1, 7), (3, 2)):
        body = {"model": "echo", "prompt": PROMPT, "n": num_choices}
        reply = (await rig.http.post("/v1/completions", json=body)).json()
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        assert reply["usage"]["completion_tokens"] == num_choices * num_tokens
    reply = (await rig.http.post("/v1/completions", json={**body, "max_tokens": 9})).json()
    assert reply["usage"]["completion_tokens"] == 27  # a limit of its own is refused by the limiter, or kept

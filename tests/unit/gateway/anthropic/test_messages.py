"""Anthropic's Messages API over real HTTP, with the official client.

The model repeats its prompt, which begins with the answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.support.gateway_ports import KEY
from tests.support.sample_tokenizers import EOS
from tests.unit.gateway.openai.test_tools import ARGUMENTS, CALL, TEMPLATE, billed
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.errors import RateLimited

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FUNCTION = {"name": "weather", "description": TOOL["description"], "parameters": TOOL["input_schema"]}
SHOWN_TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


@pytest.fixture
async def client(rig: TokenPathRig) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(api_key=KEY, base_url=rig.url, max_retries=0) as client:
        yield client


def asked(answer: str, **fields: Any) -> dict[str, Any]:
    """A request that is answered by ``answer``."""
    return {"model": "echo", "messages": [{"role": "user", "content": answer + EOS}], "max_tokens": 200, **fields}


async def test_whole_message(rig: TokenPathRig, client: Any) -> None:
    message = await client.messages.create(**asked("größer 🔥"))
    [block] = message.content
    assert block.type == "text" and block.text == "größer 🔥"
    assert (message.role, message.model, message.stop_reason) == ("assistant", "acme/echo", "end_turn")
    counted = await client.messages.count_tokens(model="echo", messages=asked("größer 🔥")["messages"])
    assert message.usage.input_tokens == counted.input_tokens
    assert message.usage.output_tokens == billed(rig, message.id)


async def test_streamed_message_is_the_same(rig: TokenPathRig, client: Any) -> None:
    body = asked(f"I look.\n{CALL}\n{CALL}", tools=[TOOL])
    whole = await client.messages.create(**body)
    kinds = []
    async with client.messages.stream(**body) as stream:
        async for event in stream:
            kinds.append(event.type)
        streamed = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    for message in (whole, streamed):
        text, *calls = message.content
        assert text.type == "text" and text.text == "I look."
        assert [call.input for call in calls if call.type == "tool_use"] == [json.loads(ARGUMENTS)] * 2
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == billed(rig, message.id)
    assert streamed.usage == whole.usage


@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop"),
    [
        ({"max_tokens": 1}, "o", "max_tokens", None),
        ({"stop_sequences": ["three", " two"]}, "one", "stop_sequence", " two"),
    ],
)
async def test_end_of_message_has_its_reason(
    client: Any, fields: dict[str, Any], text: str, reason: str, stop: str | None
) -> None:
    body = asked("one two three", **fields)
    async with client.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    for message in (await client.messages.create(**body), streamed):
        shown = "".join(block.text for block in message.content if block.type == "text")
        assert shown == text if stop else "one two three".startswith(shown)
        assert (message.stop_reason, message.stop_sequence) == (reason, stop)


async def test_conversation_reaches_the_template(rig: TokenPathRig) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "[rain]"}]}
    body = {
        "model": "echo",
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": "[be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief]"},
        ],
        "messages": [
            {"role": "user", "content": "[weather?]"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "[I look]"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "[and?]"}]},
        ],
        "tools": [TOOL],
        "metadata": {"user_id": "u"},
    }
    response = await rig.http.post("/v1/messages?beta=true", json=body, headers={"x-api-key": KEY, "authorization": ""})
    assert response.status_code == 401, "an Authorization header counts first"
    del rig.http.headers["authorization"]
    response = await rig.http.post("/v1/messages?beta=true", json=body, headers={"x-api-key": KEY})
    assert response.status_code == 200 and response.headers["request-id"] == response.json()["id"]
    prompts = [list(start.prompt) for worker in rig.workers for _, start in worker.starts if start.prompt]
    called = {"name": "weather", "arguments": use["input"]}
    expected = (
        f"[be\nbrief][weather?][I look]<tool_call>{json.dumps(called, ensure_ascii=False)}</tool_call>[rain][and?]"
    )
    assert rig.tokenizer.decode(prompts[0]) == expected + json.dumps([SHOWN_TOOL], ensure_ascii=False)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "system", "content": "a"}]}, "role must be one of user, assistant"),
        ({"messages": [{"role": "user", "content": ""}]}, "must have content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content of type 'image'"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]}, "must end with the"),
        ({"temperature": 1.5}, "temperature must be at most 1"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only custom tools are"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "not 'a b'"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "must be auto, any, none, or a tool with its name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "w"}}, "'w', which is not among tools"),
        (
            {"output_config": {"format": {"type": "text", "schema": {}}}},
            "output_config.format.type must be json_schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "if": {}}}}},
            "output_config: no answer can follow this format: ",
        ),
        ({"stop_sequences": [""]}, "stop strings"),
        ({"service_tier": "fast"}, "auto or standard_only"),
        ({"max_token": 3, "max_tokens": None}, "did you mean max_tokens"),
    ],
)
async def test_faulty_request_is_refused(rig: TokenPathRig, fields: dict[str, Any], why: str) -> None:
    given = {name: value for name, value in asked("", **fields).items() if value is not None}
    response = await rig.http.post("/v1/messages", json=given)
    error = response.json()
    assert response.status_code == 400 and why in error["error"]["message"]
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["request_id"] == response.headers["request-id"]


async def test_errors_have_the_client_s_classes(rig: TokenPathRig, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**asked(""), "model": "none"})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="tr-none").messages.create(**asked(""))
    rig.ports.refusal = RateLimited("too many", retry_after_s=3)
    with pytest.raises(anthropic.RateLimitError) as caught:
        await client.messages.create(**asked(""))
    assert caught.value.response.headers["retry-after"] == "3"
    assert (await rig.http.get("/v1/messages")).json()["error"]["type"] == "invalid_request_error"


async def test_waking_model_keeps_the_stream_alive_by_pings(make_rig: MakeRig) -> None:
    rig = await make_rig(template=TEMPLATE, keep_alive_s=0.05)
    rig.workers[0].pause_at = rig.workers[1].pause_at = 1
    kinds: list[str] = []
    async with rig.http.stream("POST", "/v1/messages", json=asked("one two", stream=True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: "))
            if kinds.count("ping") == 2:
                break
    assert kinds[0] == "message_start"


async def test_counting_wakes_no_model(rig: TokenPathRig, client: Any) -> None:
    messages: Any = [{"role": "user", "content": "one"}]
    counted = await client.messages.count_tokens(model="echo", messages=messages, tools=[TOOL])
    assert counted.input_tokens > len("one")
    assert not any(worker.starts for worker in rig.workers) and not rig.ports.settled


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container", "c-1"),
        ("inference_geo", "us"),
    ],
)
async def test_fields_that_would_change_the_answer_are_refused(rig: TokenPathRig, field: str, value: Any) -> None:
    body = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    refused = await rig.http.post("/v1/messages", json={**body, field: value})
    assert refused.status_code == 400 and f"{field}" in refused.json()["error"]["message"]
    harmless = {**body, field: None, "cache_control": {"type": "ephemeral"}, "speed": "fast"}
    assert (await rig.http.post("/v1/messages", json=harmless)).status_code == 200
    effort = await rig.http.post("/v1/messages", json={**body, "output_config": {"effort": "low"}})
    assert effort.status_code == 200

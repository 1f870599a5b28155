"""Tools over real HTTP with the official client. The model repeats its prompt, which begins with the answer."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.sample_tokenizers import EOS
from tests.unit.gateway.openai.test_asgi_app import events_of
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ARGUMENTS = '{"city": "Köln 🔥"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


def asked(answer: str, **fields: Any) -> dict[str, Any]:
    """A request that is answered by ``answer``."""
    messages = [{"role": "user", "content": answer + EOS}]
    return {"model": "echo", "messages": messages, "max_tokens": 200, "tools": [TOOL], **fields}


def billed(rig: TokenPathRig, request_id: str) -> int:
    """The output tokens on the bill of a request."""
    return sum(usage.num_output_tokens for usage in rig.ports.settled[request_id])


async def test_answer_has_calls_and_content(rig: TokenPathRig) -> None:
    reply = await rig.client.chat.completions.create(**asked(f"I look.\n{CALL}\n{CALL}"))
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == second.type == "function" and first.id != second.id
    assert (first.function.name, first.function.arguments) == ("weather", ARGUMENTS)
    assert reply.usage is not None and reply.usage.completion_tokens == billed(rig, reply.id)


async def test_streamed_calls_have_their_places(rig: TokenPathRig) -> None:
    body = asked(f"I look.\n{CALL}\n{CALL}", stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in await rig.client.chat.completions.create(**body)]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "I look."
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert all(call.function is not None and call.function.arguments == ARGUMENTS for call in calls)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == billed(rig, chunks[0].id)


async def test_answer_without_a_call_is_unchanged(rig: TokenPathRig) -> None:
    for answer in (" It rains. \n", CALL[:-1]):
        reply = await rig.client.chat.completions.create(**asked(answer))
        assert reply.choices[0].message.content == answer and reply.choices[0].message.tool_calls is None
        assert reply.choices[0].finish_reason == "stop"
        events = events_of((await rig.http.post("/v1/chat/completions", json=asked(answer, stream=True))).text)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == answer
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_cut_call_is_content(rig: TokenPathRig) -> None:
    reply = await rig.client.chat.completions.create(**asked(CALL, max_tokens=20))
    assert reply.choices[0].finish_reason == "length" and reply.choices[0].message.tool_calls is None
    assert reply.choices[0].message.content and CALL.startswith(reply.choices[0].message.content)


async def test_call_and_result_reach_the_template(rig: TokenPathRig) -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call("c1", ARGUMENTS), call("c2", "{broken")]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": EOS},
    ]
    body = {"model": "echo", "messages": messages, "max_tokens": 300, "return_token_ids": True}
    reply = (await rig.http.post("/v1/chat/completions", json=body)).json()
    prompt = rig.tokenizer.decode(reply["prompt_token_ids"], skip_special_tokens=True)
    first = {"name": "weather", "arguments": json.loads(ARGUMENTS)}
    broken = {"name": "weather", "arguments": "{broken"}
    written = "".join(f"<tool_call>{json.dumps(each, ensure_ascii=False)}</tool_call>" for each in (first, broken))
    assert prompt == f"{written}rain"
    assert "tool_calls" not in reply["choices"][0]["message"], "the request declares no tools"


def call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


async def test_template_gets_tools_unless_none_may_be_called(rig: TokenPathRig) -> None:
    listed = {}
    for choice in ("auto", "none"):
        body = asked("", tool_choice=choice, return_token_ids=True)
        reply = (await rig.http.post("/v1/chat/completions", json=body)).json()
        listed[choice] = rig.tokenizer.decode(reply["prompt_token_ids"], skip_special_tokens=True)
    assert json.loads(listed["auto"]) == [TOOL] and listed["none"] == ""


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"tools": [{}]}, "tools", "tools[0].type must be 'function'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0]: "),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "not 'a b'"),
        ({"tools": [TOOL] * 129}, "tools", "at most 128"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools", "strict"),
        ({"tool_choice": "required"}, "tool_choice", "not supported yet"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice", "not supported yet"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "not supported yet"),
        ({"logprobs": True}, "logprobs", "not supported yet"),
    ],
)
async def test_faulty_tools_are_refused(rig: TokenPathRig, fields: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await rig.client.chat.completions.create(**asked("", **fields))
    assert caught.value.param == param and why in caught.value.message


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "knows no tools"),
        (TEMPLATE.replace("<tool_call>", "[CALL]"), "in a syntax that is not supported yet"),
    ],
)
async def test_template_without_tool_calls_is_named(make_rig: MakeRig, template: str, why: str) -> None:
    rig = await make_rig(template=template)
    with pytest.raises(openai.BadRequestError) as caught:
        await rig.client.chat.completions.create(**asked(""))
    assert caught.value.param == "tools" and why in caught.value.message

"""Tools over real HTTP with the official client. The model repeats its prompt, which begins with the answer."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import EOS, tiny_tokenizer
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
    for index in (0, 1):
        first, *others = [call for call in calls if call.index == index]
        assert first.id and first.type == "function" and first.function is not None
        assert (first.function.name, first.function.arguments) == ("weather", "")
        pieces = [call.function.arguments for call in others if call.function is not None]
        assert len(pieces) > 3 and "".join(piece or "" for piece in pieces) == ARGUMENTS
        assert not any(call.id or call.type for call in others)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == billed(rig, chunks[0].id)


async def test_answer_without_a_call_is_unchanged(rig: TokenPathRig) -> None:
    for answer in (" It rains. \n", CALL.replace("weather", "other")[:-20]):
        reply = await rig.client.chat.completions.create(**asked(answer))
        assert reply.choices[0].message.content == answer and reply.choices[0].message.tool_calls is None
        assert reply.choices[0].finish_reason == "stop"
        events = events_of((await rig.http.post("/v1/chat/completions", json=asked(answer, stream=True))).text)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == answer
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_cut_call_has_the_arguments_that_were_written(rig: TokenPathRig) -> None:
    [choice] = (await rig.client.chat.completions.create(**asked(CALL, max_tokens=50))).choices
    assert choice.finish_reason == "length" and choice.message.content is None and choice.message.tool_calls
    [cut] = choice.message.tool_calls
    assert cut.type == "function" and cut.function.name == "weather"
    assert 0 < len(cut.function.arguments) < len(ARGUMENTS) and ARGUMENTS.startswith(cut.function.arguments)
    body = asked(CALL, max_tokens=50, stream=True)
    events = events_of((await rig.http.post("/v1/chat/completions", json=body)).text)
    pieces = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == cut.function.arguments
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_cut_call_of_an_unknown_tool_is_content(rig: TokenPathRig) -> None:
    written = CALL.replace("weather", "other")
    reply = await rig.client.chat.completions.create(**asked(written, max_tokens=40))
    assert reply.choices[0].finish_reason == "length" and reply.choices[0].message.tool_calls is None
    assert reply.choices[0].message.content and written.startswith(reply.choices[0].message.content)


def special_tokenizer(*tokens: str) -> bytes:
    tokenizer = Tokenizer.from_str(tiny_tokenizer().decode())
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("opening", "answer"),
    [
        ("[TOOL_CALLS]", f'I look.[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
        ("[TOOL_CALLS]", f"I look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
        ("<|python_tag|>", f'I look.<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}'),
        (
            "<tool_call><function=",
            "I look.<tool_call><function=weather><parameter=city>Köln 🔥</parameter></function></tool_call>",
        ),
    ],
)
async def test_calls_in_other_syntaxes(make_rig: MakeRig, opening: str, answer: str, is_stream: bool) -> None:
    tokenizer = special_tokenizer("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>")
    rig = await make_rig(template=TEMPLATE.replace("<tool_call>", opening), tokenizer=tokenizer)
    body = asked(answer, stream=is_stream, stop=["no such text", "I look!"])
    response = await rig.http.post("/v1/chat/completions", json=body)
    choices = [event["choices"][0] for event in events_of(response.text)] if is_stream else response.json()["choices"]
    messages = [choice["delta" if is_stream else "message"] for choice in choices]
    assert "".join(message.get("content") or "" for message in messages) == "I look."
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert functions[0]["name"] == "weather"
    assert "".join(function["arguments"] for function in functions) == ARGUMENTS
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_special_tokens_stay_hidden_without_tools(make_rig: MakeRig) -> None:
    tokenizer = special_tokenizer("[TOOL_CALLS]", "[ARGS]")
    rig = await make_rig(template=TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"), tokenizer=tokenizer)
    body = asked("I look.[TOOL_CALLS]weather[ARGS]{}") | {"tools": None}
    [choice] = (await rig.client.chat.completions.create(**body)).choices
    assert choice.message.content == "I look.weather{}" and choice.message.tool_calls is None


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
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": PARAMETERS, "strict": True}}]},
            "tools",
            "tools[0].function.parameters: an object of a strict schema must have 'additionalProperties': false",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", 'must be "none", "auto", "required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "w"}}}, "tool_choice", "'w', which is not among"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}}},
            "tool_choice",
            "must be functions",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}] * 129}}},
            "tool_choice",
            "allows 129 tools",
        ),
        ({"extra_body": {"guided_grammar": 'start: "a"'}}, "guided_grammar", "cannot be combined with tools"),
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

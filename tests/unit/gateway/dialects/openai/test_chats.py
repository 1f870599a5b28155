"""Chats over REST: token ids, reasoning, tools in several syntaxes, and variables of the template."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import EOS, tiny_tokenizer
from tests.unit.gateway.dialects.all_dialects import ARGUMENTS, CALL, FUNCTION, TEMPLATE
from tests.unit.gateway.dialects.openai.test_completions import events_of
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig

TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
THOUGHT = "<think>\nThe 🔥 is hot.\n</think>\n\nHot."
HUGE, BEYOND = 1 << 70, "below -2**63 or above 2**64 - 1"


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


def asked(answer: str, **fields: Any) -> dict[str, Any]:
    """A request that is answered by ``answer``."""
    return {"model": "echo", "messages": [{"role": "user", "content": answer + EOS}], "max_tokens": 150, **fields}


async def posted(rig: TokenPathRig, body: dict[str, Any]) -> Any:
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(rig: TokenPathRig, body: dict[str, Any]) -> list[dict[str, Any]]:
    return events_of((await rig.http.post("/v1/chat/completions", json={**body, "stream": True})).text)


async def test_ids_of_the_prompt_are_beside_the_choices(rig: TokenPathRig) -> None:
    """As in vLLM."""
    body = asked("hello", n=2, return_token_ids=True, stream_options={"include_usage": True}, stream=True)
    prompt = rig.tokenizer.encode(f"hello{EOS}").ids
    events = await streamed(rig, body)
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    whole = await posted(rig, asked("hello", n=2, return_token_ids=True))
    assert whole["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in choice for event in (*events, whole) for choice in event["choices"])
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and whole["object"] == "chat.completion"
    assert len(events) == 2 * (1 + 1) + whole["usage"]["completion_tokens"] + 1  # roles, ends, tokens, usage


async def test_reasoning_has_the_names_of_two_servers_and_counts(rig: TokenPathRig) -> None:
    reply = await posted(rig, asked(THOUGHT))
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "The 🔥 is hot." and message["content"] == "Hot."
    inside = len(rig.tokenizer.encode(THOUGHT.partition("\n\n")[0]).ids)
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": inside}
    assert reply["usage"]["completion_tokens"] > inside
    hidden = await posted(rig, asked(THOUGHT, include_reasoning=False))
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "Hot.", "refusal": None}
    assert hidden["usage"] == reply["usage"]
    events = await streamed(rig, asked(THOUGHT, include_reasoning=False))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert {name for delta in deltas for name in delta} == {"role", "content"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hot."


@pytest.mark.parametrize(
    ("answer", "fields"),
    [(THOUGHT, {"logprobs": True}), (THOUGHT, {"n": 2}), (f"I look.\n{CALL}", {"logprobs": True, "tools": [TOOL]})],
)
async def test_streamed_choices_are_those_of_the_reply(rig: TokenPathRig, answer: str, fields: dict[str, Any]) -> None:
    whole = await posted(rig, asked(answer, **fields))
    events = await streamed(rig, asked(answer, **fields, stream=True, stream_options={"include_usage": True}))
    choices = [choice for event in events for choice in event["choices"]]
    for expected in whole["choices"]:
        deltas = [choice["delta"] for choice in choices if choice["index"] == expected["index"]]
        for name in ("content", "reasoning_content", "reasoning"):
            assert "".join(delta.get(name, "") for delta in deltas) == expected["message"].get(name, ""), name
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert entries == [e for choice in whole["choices"] for e in (choice["logprobs"] or {}).get("content", ())]
    assert len(entries) == ("logprobs" in fields) * whole["usage"]["completion_tokens"]
    assert events[-1]["usage"] == whole["usage"]


async def test_prompt_may_begin_the_reasoning(make_rig: MakeRig) -> None:
    """An answer by a grammar of the caller has none."""
    rig = await make_rig(template=TEMPLATE + "{{ '<think>\n' }}")
    for fields, expected in (
        ({}, ("Hm.", "Hot.")),
        ({"guided_grammar": "start: /(.|\\n)*/"}, (None, "Hm.</think>Hot.")),
    ):
        [choice] = (await posted(rig, asked("Hm.</think>Hot.", **fields)))["choices"]
        assert (choice["message"].get("reasoning_content"), choice["message"]["content"]) == expected


async def test_streamed_calls_have_their_places(rig: TokenPathRig) -> None:
    events = await streamed(rig, asked(f"I look.\n{CALL}\n{CALL}", tools=[TOOL]))
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    for index in (0, 1):
        first, *others = [call for call in calls if call["index"] == index]
        assert first["id"] and first["type"] == "function"
        assert first["function"] == {"name": "weather", "arguments": ""}
        assert len(others) > 3 and not any("id" in call or "type" in call for call in others)
        assert "".join(call["function"]["arguments"] for call in others) == ARGUMENTS


def special_tokenizer(*tokens: str) -> bytes:
    tokenizer = Tokenizer.from_str(tiny_tokenizer().decode())
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer.to_str().encode()


SYNTAXES = [
    ("[TOOL_CALLS]", f'I look.[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
    ("[TOOL_CALLS]", f"I look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    ("<|python_tag|>", f'I look.<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}'),
    (
        "<tool_call><function=",
        "I look.<tool_call><function=weather><parameter=city>Köln 🔥</parameter></function></tool_call>",
    ),
]


@pytest.mark.parametrize(("opening", "answer"), SYNTAXES)
async def test_calls_in_other_syntaxes(make_rig: MakeRig, opening: str, answer: str) -> None:
    tokenizer = special_tokenizer("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>")
    rig = await make_rig(template=TEMPLATE.replace("<tool_call>", opening), tokenizer=tokenizer)
    body = asked(answer, tools=[TOOL], stop=["no such text", "I look!"])
    [whole] = (await posted(rig, body))["choices"]
    choices = [event["choices"][0] for event in await streamed(rig, body)]
    for messages, end in (([whole["message"]], whole), ([choice["delta"] for choice in choices], choices[-1])):
        assert "".join(message.get("content") or "" for message in messages) == "I look."
        functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        assert functions[0]["name"] == "weather" and end["finish_reason"] == "tool_calls"
        assert "".join(function["arguments"] for function in functions) == ARGUMENTS
    [choice] = (await posted(rig, asked("I look.[TOOL_CALLS]weather[ARGS]{}")))["choices"]
    assert choice["message"]["content"] == "I look.weather{}", "special tokens stay hidden without tools"


async def test_call_that_is_no_json_reaches_the_template(rig: TokenPathRig) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{broken"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": EOS}]
    reply = await posted(rig, asked("") | {"messages": messages, "return_token_ids": True})
    shown = json.dumps({"name": "weather", "arguments": "{broken"})
    assert rig.tokenizer.decode(reply["prompt_token_ids"]) == f"<tool_call>{shown}</tool_call>"
    assert "tool_calls" not in reply["choices"][0]["message"], "the request declares no tools"


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
        await rig.client.chat.completions.create(**asked("", tools=[TOOL]))
    assert caught.value.param == "tools" and why in caught.value.message


async def test_template_gets_its_variables(make_rig: MakeRig) -> None:
    thought = "{% if enable_thinking is defined and not enable_thinking %}plain{% else %}thought{% endif %}"
    rig = await make_rig(template=thought + "{{ bos_token }}")
    for kwargs, prompt in (
        (None, "thought"),
        ({"enable_thinking": False}, "plain"),
        ({"enable_thinking": True, "unknown": [1]}, "thought"),
        ({"enable_thinking": False, "bos_token": " x"}, "plain x"),
    ):
        reply = await posted(rig, asked("x", max_tokens=1, return_token_ids=True, chat_template_kwargs=kwargs))
        assert reply["prompt_token_ids"] == rig.tokenizer.encode(prompt, add_special_tokens=False).ids

"""Reasoning of models whose template has it, in chat replies and Anthropic's messages. The model repeats its prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.sample_tokenizers import EOS
from tests.unit.gateway.openai.test_asgi_app import events_of
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}"
)
ANSWER = "<think>\nThe 🔥 is hot.\n</think>\n\nHot."
SAMPLE: dict[str, Any] = {"model": "echo", "max_tokens": 100, "messages": [{"role": "user", "content": ANSWER + EOS}]}


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


async def posted(rig: TokenPathRig, path: str, **fields: Any) -> dict[str, Any]:
    reply: dict[str, Any] = (await rig.http.post(path, json={**SAMPLE, **fields})).json()
    return reply


def message_events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: ")]


async def test_reply_has_reasoning_and_counts_its_tokens(rig: TokenPathRig) -> None:
    reply = await posted(rig, "/v1/chat/completions")
    message = reply["choices"][0]["message"]
    assert message["content"] == "Hot." and message["reasoning_content"] == message["reasoning"] == "The 🔥 is hot."
    inside = len(rig.tokenizer.encode(ANSWER.partition("\n\n")[0]).ids)
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": inside}
    assert reply["usage"]["completion_tokens"] > inside


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"n": 2}])
async def test_streamed_reasoning_is_that_of_the_reply(rig: TokenPathRig, fields: dict[str, Any]) -> None:
    whole = await posted(rig, "/v1/chat/completions", **fields)
    body = {**SAMPLE, **fields, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of((await rig.http.post("/v1/chat/completions", json=body)).text)
    choices = [choice for event in events for choice in event["choices"]]
    for expected in whole["choices"]:
        deltas = [choice["delta"] for choice in choices if choice["index"] == expected["index"]]
        for name in ("content", "reasoning_content", "reasoning"):
            text = "".join(delta.get(name, "") for delta in deltas)
            assert text == expected["message"].get(name, ""), name
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert entries == [e for choice in whole["choices"] for e in (choice["logprobs"] or {}).get("content", ())]
    assert events[-1]["usage"] == whole["usage"]


async def test_reasoning_may_be_left_out(rig: TokenPathRig) -> None:
    reply = await posted(rig, "/v1/chat/completions", include_reasoning=False)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Hot.", "refusal": None}
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    body = {**SAMPLE, "include_reasoning": False, "stream": True}
    events = events_of((await rig.http.post("/v1/chat/completions", json=body)).text)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert {name for delta in deltas for name in delta} == {"role", "content"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hot."


async def test_prompt_may_begin_the_reasoning(make_rig: MakeRig) -> None:
    rig = await make_rig(template=TEMPLATE + "{{ '<think>\n' }}")
    reply = await posted(rig, "/v1/chat/completions", messages=[{"role": "user", "content": "Hm.</think>Hot." + EOS}])
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hot.")


async def test_earlier_reasoning_reaches_the_template(rig: TokenPathRig) -> None:
    for earlier in (
        {"role": "assistant", "content": "Hot.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "Hot.", "reasoning": "Hm."},
    ):
        body = {"messages": [earlier, SAMPLE["messages"][0]], "return_token_ids": True}
        reply = await posted(rig, "/v1/chat/completions", **body)
        prompt: str = rig.tokenizer.decode(reply["prompt_token_ids"])
        assert prompt.startswith("Hot.<think>Hm.</think><think>")


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
async def test_message_has_thinking_if_asked_for(rig: TokenPathRig, thinking: dict[str, Any]) -> None:
    message = await posted(rig, "/v1/messages", thinking=thinking)
    blocks = [{"type": "thinking", "thinking": "The 🔥 is hot.", "signature": ""}, {"type": "text", "text": "Hot."}]
    assert message["content"] == blocks
    body = {**SAMPLE, "thinking": thinking, "stream": True}
    events = message_events((await rig.http.post("/v1/messages", json=body)).text)
    built = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for event in events:
        if event["type"] == "content_block_delta":
            for name in ("thinking", "text", "signature"):
                built[event["index"]][name] = built[event["index"]].get(name, "") + event["delta"].get(name, "")
    assert [{name: value for name, value in block.items() if value or name == "signature"} for block in built] == [
        blocks[0],
        {**blocks[1], "signature": ""},
    ]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
async def test_message_has_no_thinking_otherwise(rig: TokenPathRig, thinking: dict[str, Any] | None) -> None:
    message = await posted(rig, "/v1/messages", thinking=thinking)
    assert message["content"] == [{"type": "text", "text": "Hot."}]
    body = {**SAMPLE, "thinking": thinking, "stream": True}
    events = message_events((await rig.http.post("/v1/messages", json=body)).text)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == "Hot."
    last = next(event for event in events if event["type"] == "message_delta")
    assert last["usage"]["output_tokens"] == message["usage"]["output_tokens"] > 10


async def test_kind_of_thinking_is_checked(rig: TokenPathRig) -> None:
    response = await rig.http.post("/v1/messages", json={**SAMPLE, "thinking": {"type": "maybe"}})
    assert response.status_code == 400 and "thinking.type" in response.json()["error"]["message"]


async def test_earlier_thinking_reaches_the_template(rig: TokenPathRig) -> None:
    answer = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Hot."}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "b"},
    ]
    count = await posted(rig, "/v1/messages/count_tokens", messages=messages)
    text = "aHot.<think>Hm.</think>b"
    assert count["input_tokens"] == len(rig.tokenizer.encode(text).ids)


async def test_answer_by_a_grammar_of_the_caller_is_no_reasoning(make_rig: MakeRig) -> None:
    rig = await make_rig(template=TEMPLATE + "<think>")
    sample = {"messages": [{"role": "user", "content": f"Hot.{EOS}</think>"}], "max_tokens": 4}
    free = (await posted(rig, "/v1/chat/completions", **sample))["choices"][0]["message"]
    held = (await posted(rig, "/v1/chat/completions", **sample, guided_grammar="start: /(.|\\n)*/"))["choices"][0][
        "message"
    ]
    assert free["reasoning_content"] and not free["content"]
    assert held["content"] == free["reasoning_content"] and not held.get("reasoning_content")

"""Anthropic's Messages API: what it has beside the promises of all dialects. The model repeats its prompt."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.gateway_ports import KEY
from tests.support.sample_tokenizers import EOS
from tests.unit.gateway.dialects.all_dialects import ARGUMENTS, CALL, PARAMETERS, TEMPLATE
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.gateway.dialects.anthropic.conversation import Conversation, Message
from torchrelay.gateway.inference.parameter_ranges import MAX_MESSAGES

TOOL: dict[str, Any] = {"name": "weather", "input_schema": PARAMETERS}
THOUGHT = "<think>\nThe 🔥 is hot.\n</think>\n\n"


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


def asked(answer: str, **fields: Any) -> dict[str, Any]:
    """A request that is answered by ``answer``."""
    return {"model": "echo", "messages": [{"role": "user", "content": answer + EOS}], "max_tokens": 150, **fields}


async def posted(rig: TokenPathRig, body: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = (await rig.http.post("/v1/messages", json=body)).json()
    return reply


async def events_of(rig: TokenPathRig, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = (await rig.http.post("/v1/messages", json={**body, "stream": True})).text
    named = [event.split("\n") for event in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    return [event for event in events if event["type"] != "ping"]


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "adaptive"},
        None,
        {"type": "disabled"},
        {"type": "adaptive", "display": "omitted"},
    ],
)
async def test_blocks_and_their_events(rig: TokenPathRig, thinking: dict[str, Any] | None) -> None:
    """A block of thinking only for requests that ask for it; its tokens count in any case."""
    body = asked(f"{THOUGHT}I look.\n{CALL}", tools=[TOOL], thinking=thinking)
    whole = await posted(rig, body)
    use = {"type": "tool_use", "id": whole["content"][-1]["id"], "name": "weather", "input": json.loads(ARGUMENTS)}
    blocks = [{"type": "thinking", "thinking": "The 🔥 is hot.", "signature": ""}, {"type": "text", "text": "I look."}]
    is_shown = thinking is not None and thinking["type"] != "disabled" and "display" not in thinking
    assert whole["content"] == [*blocks[not is_shown :], use]

    begin, *events, last, stop = await events_of(rig, body)
    message = begin["message"]
    assert (begin["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    assert (last["type"], stop) == ("message_delta", {"type": "message_stop"})
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"] == whole["usage"] and last["usage"]["output_tokens"] > len(ARGUMENTS) / 4
    built: list[dict[str, Any]] = []
    for event in events:
        assert event["index"] == len(built) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                built.append({**event["content_block"], "partial_json": ""})
            case "content_block_delta":
                for name in {*event["delta"]} - {"type"}:
                    built[-1][name] += event["delta"][name]
            case other:
                assert other == "content_block_stop"
    texts = [{name: value for name, value in block.items() if name != "partial_json"} for block in built]
    assert texts[:-1] == whole["content"][:-1]
    assert texts[-1] == {**use, "id": texts[-1]["id"], "input": {}} and built[-1]["partial_json"] == ARGUMENTS


async def test_model_without_tools_and_reasoning_answers_with_text(make_rig: MakeRig) -> None:
    """Its pieces are not parsed; characters take several tokens."""
    rig = await make_rig()
    body = asked("größer 🔥", max_tokens=30)
    body["messages"] = [{"role": "user", "content": "🔥"}, {"role": "assistant", "content": "🔥"}, *body["messages"]]
    [block] = (await posted(rig, body))["content"]
    deltas = [event["delta"] for event in await events_of(rig, body) if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == block["text"] and "🔥" in block["text"]


async def test_key_of_either_header_counts(rig: TokenPathRig) -> None:
    both = await rig.http.post("/v1/messages", json=asked("a"), headers={"x-api-key": KEY, "authorization": ""})
    assert both.status_code == 401, "an Authorization header counts first"
    del rig.http.headers["authorization"]
    response = await rig.http.post("/v1/messages?beta=true", json=asked("a"), headers={"x-api-key": KEY})
    assert response.status_code == 200 and response.headers["request-id"] == response.json()["id"]


async def test_counting_wakes_no_model(rig: TokenPathRig) -> None:
    body = {name: value for name, value in asked("one", tools=[TOOL]).items() if name != "max_tokens"}
    counted = (await rig.http.post("/v1/messages/count_tokens", json=body)).json()
    assert not any(worker.starts for worker in rig.workers) and not rig.ports.settled
    assert counted == {"input_tokens": (await posted(rig, {**body, "max_tokens": 1}))["usage"]["input_tokens"]}


HELLO = {"role": "user", "content": "Hello."}


async def prompt_of(rig: TokenPathRig, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, httpx.Headers]:
    """The prompt of a request as its worker gets it, and the headers of its answer."""
    body = {"model": "echo", "messages": messages, "max_tokens": 1, **fields}
    response = await rig.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    [*_, prompt] = [list(start.prompt) for worker in rig.workers for _, start in worker.starts if start.prompt]
    return rig.tokenizer.decode(prompt), response.headers


ROLES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


async def test_turns_of_a_role_are_one_and_the_system_may_speak_later(make_rig: MakeRig) -> None:
    """Coding agents describe their surroundings in a message of the system after the user's."""
    rig = await make_rig(template=ROLES)
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [("user", "u"), ("system", blocks), ("user", "v"), ("assistant", "x"), ("assistant", "y")]
    more = [("system", "late"), ("user", "w")]
    messages = [{"role": role, "content": content} for role, content in (*turns, *more)]
    prompt, headers = await prompt_of(rig, messages, system="s")
    assert prompt == "<system>s\n\na\nb<user>u\nv<assistant>x\ny<user>late\nw"
    assert "x-torchrelay-left-out" not in headers


async def test_answer_continues_the_beginning_that_is_given(make_rig: MakeRig) -> None:
    rig = await make_rig(template=ROLES + "</s>{% if add_generation_prompt %}<assistant>{% endif %}")
    prompt, _ = await prompt_of(rig, [HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The sum"}]}])
    assert prompt == "<user>Hello.<assistant>The sum"
    body = {"model": "echo", "messages": [HELLO, {"role": "assistant", "content": "The sum"}]}
    counted = (await rig.http.post("/v1/messages/count_tokens", json=body)).json()
    assert counted["input_tokens"] == len(rig.tokenizer.encode(prompt, add_special_tokens=False).ids)


async def test_conversation_that_ends_with_a_call_is_counted(make_rig: MakeRig) -> None:
    """Agents count what they will send before they have the result."""
    rig = await make_rig(template=ROLES)
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    body = {"model": "echo", "messages": [HELLO, {"role": "assistant", "content": [call]}]}
    counted = await rig.http.post("/v1/messages/count_tokens", json=body)
    assert counted.status_code == 200 and counted.json()["input_tokens"] > 0


def test_many_messages_are_taken_in_linear_time() -> None:
    """Those of the system look for an earlier answer: with a look at all messages each it would take minutes."""
    result = {"role": "user", "content": [{"type": "tool_result", "content": "a"}]}
    turns = [result] * (MAX_MESSAGES // 2) + [{"role": "system", "content": "b"}] * (MAX_MESSAGES // 2)
    conversation = Conversation(None)
    for turn in msgspec.convert(turns, list[Message]):
        conversation.add(turn, "")
    assert len(conversation.messages()) == 1 + MAX_MESSAGES // 2


async def test_late_words_of_the_system_follow_the_results_of_calls(make_rig: MakeRig) -> None:
    rig = await make_rig(template=ROLES)
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    turns: list[dict[str, Any]] = [
        HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "system", "content": "late"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
        {"role": "system", "content": "later"},
    ]
    prompt, _ = await prompt_of(rig, turns, tools=[TOOL])
    assert prompt.partition("</tool_call>")[2].partition("[{")[0] == "<tool>rain<user>late\nlater"


async def test_content_of_other_kinds_is_text(make_rig: MakeRig) -> None:
    rig = await make_rig(template=ROLES)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    note = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "n"}}
    scan = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}
    used = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
    found: dict[str, Any] = {
        "type": "search_result",
        "title": "R",
        "source": "x",
        "content": [{"type": "text", "text": "r"}],
    }
    hits = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]}
    answer = [used, hits, {"type": "tool_use", "id": "c1", "name": "f", "input": {}}]
    failed = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": [image, found]}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [note, scan]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [failed]},
    ]
    prompt, headers = await prompt_of(
        rig,
        turns,
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "mcp_toolset"}],
    )
    text, _, tools = prompt.partition("[{")
    assert text == (
        "<user>Notes\nn\n[file left out: this model reads text only]"
        '<assistant>[called web_search: {"query": "q"}]\n[result left out]<tool_call>f</tool_call>'
        "<tool>Error: [image left out: this model reads text only]\nR\nr"
    )
    assert "weather" in tools and "web_search" not in tools
    assert headers["x-torchrelay-left-out"] == "file, image, tool"


async def test_deferred_tool_is_shown_once_a_result_refers_to_it(make_rig: MakeRig) -> None:
    rig = await make_rig(template=ROLES)
    tools = [{**TOOL, "name": "rain", "defer_loading": True}, TOOL]
    prompt, _ = await prompt_of(rig, [HELLO], tools=tools)
    assert "weather" in prompt and "rain" not in prompt
    found = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "rain"}]}
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    turns: list[dict[str, Any]] = [
        HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [found]},
    ]
    prompt, _ = await prompt_of(rig, turns, tools=tools)
    shown = json.loads(prompt[prompt.index("[{") :])
    assert [tool["function"]["name"] for tool in shown] == ["weather", "rain"]
    assert "<tool>The tool rain can be called now." in prompt


async def test_prompt_that_is_too_long_is_refused_in_the_words_that_agents_know(rig: TokenPathRig) -> None:
    """Claude Code shortens a conversation if the whole message matches."""
    error = (await posted(rig, asked("a " * 600)))["error"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 512 maximum", error["message"])


async def test_nesting_at_the_limit_of_the_decoder_is_no_crash(rig: TokenPathRig) -> None:
    head = (
        '{"model":"echo","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"server_tool_use","name":"f"'
    )
    for depth in range(980, 1000):
        call = ',"input":' + '{"a":' * depth + "{}" + "}" * depth
        content = head + call + '}]},{"role":"user","content":"a"}]}'
        response = await rig.http.post("/v1/messages", content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text


async def test_stream_begins_with_the_cached_tokens_of_its_prompt(rig: TokenPathRig) -> None:
    """The first event counted all tokens as uncached, and the last one did not."""
    for worker in rig.workers:
        worker.num_cached = 3
    begin, *_, last, _ = await events_of(rig, asked("yes"))
    first = begin["message"]["usage"]
    assert first["cache_read_input_tokens"] == last["usage"]["cache_read_input_tokens"] == 3
    assert first["input_tokens"] == last["usage"]["input_tokens"]

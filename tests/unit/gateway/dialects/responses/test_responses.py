"""The Responses API: what it has beside the promises of all dialects. The model repeats its prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from tests.support.sample_tokenizers import EOS
from tests.support.wait import eventually
from tests.unit.gateway.dialects.all_dialects import ARGUMENTS, CALL, PARAMETERS, TEMPLATE
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.errors import Unavailable
from torchrelay.gateway.dialects.responses.events import Event
from torchrelay.gateway.dialects.responses.output import Output
from torchrelay.gateway.dialects.responses.tools import ToolName
from torchrelay.gateway.inference.answers.parts import CallArguments, CallBegin, Part, Reasoning

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
PATCH_CALL = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+größer"}}\n</tool_call>'
SPAWN_CALL = '<tool_call>\n{"name": "agents__spawn", "arguments": {"task": "a"}}\n</tool_call>'
SPAWN = {"type": "function", "name": "spawn", "parameters": PARAMETERS}
AGENTS: dict[str, Any] = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [SPAWN]}


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


def asked(answer: str, **fields: Any) -> dict[str, Any]:
    """A request that is answered by ``answer``."""
    return {"model": "echo", "input": answer + EOS, "max_output_tokens": 150, **fields}


async def both(rig: TokenPathRig, body: dict[str, Any]) -> tuple[Any, Any]:
    """The whole answer and the streamed answer, which are the same."""
    whole = await rig.client.responses.create(**body)
    *_, last = [event async for event in await rig.client.responses.create(**body, stream=True)]
    assert last.type in ("response.completed", "response.incomplete")
    assert without_ids(whole) == without_ids(last.response)
    return whole, last.response


def without_ids(response: Response) -> dict[str, Any]:
    shown = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in shown["output"]:
        del item["id"]
        item.pop("call_id", None)
    return shown


def prompt_of(rig: TokenPathRig) -> str:
    """The text of the last prompt."""
    starts = [start for worker in rig.workers for _, start in worker.starts if start.prompt]
    last = max(starts, key=lambda start: [opened.request_id for opened in rig.ports.opened].index(start.key.request_id))
    text: str = rig.tokenizer.decode(list(last.prompt))
    return text


async def test_reply_repeats_the_request(rig: TokenPathRig) -> None:
    repeated = {"temperature": 0.7, "service_tier": "flex", "metadata": {"a": "b"}, "max_output_tokens": 9}
    asked_format = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False}
    for wanted, shown in ((None, {"type": "text"}), (asked_format, asked_format)):
        extra: dict[str, Any] = {} if wanted is None else {"text": {"format": wanted}}
        for response in await both(rig, asked("größer", instructions="", store=True, **repeated, **extra)):
            reply = response.to_dict()
            assert repeated.items() <= reply.items() and shown.items() <= reply["text"]["format"].items()
            assert (response.object, response.error, reply["store"]) == ("response", None, False)
            assert response.id.startswith("resp_") and response.model == "acme/echo"


async def test_events_come_in_their_order(rig: TokenPathRig) -> None:
    calls = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "c", "arguments": {"input": "a"}}</tool_call>'
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]
    body = asked(f"<think>Hm.</think>I look.\n{calls}", tools=tools, stream=True)
    events = [event async for event in await rig.client.responses.create(**body)]
    kinds = [kind for kind, _ in groupby(event.type.removeprefix("response.") for event in events)]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    places = [event.output_index for event in events[2:-1]]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    first, last = events[0], events[-1]
    assert last.response.output == [event.item for event in events if event.type == "response.output_item.done"]
    assert first.response.id == last.response.id
    assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)


async def test_helpers_of_the_client_work(rig: TokenPathRig) -> None:
    async with rig.client.responses.stream(**asked(CALL, tools=[TOOL])) as stream:
        kinds = [event.type async for event in stream]
        [call] = (await stream.get_final_response()).output
    assert call.type == "function_call" and call.arguments == ARGUMENTS
    assert "response.function_call_arguments.delta" in kinds


@pytest.mark.parametrize(
    ("answer", "tool", "item", "arguments"),
    [
        (CALL, TOOL, {"type": "function_call", "name": "weather", "arguments": ARGUMENTS}, json.loads(ARGUMENTS)),
        (
            PATCH_CALL,
            PATCH,
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\n+größer"},
            {"input": "*** Begin\n+größer"},
        ),
        (SPAWN_CALL, AGENTS, {"type": "function_call", "name": "spawn", "namespace": "agents"}, {"task": "a"}),
    ],
)
async def test_output_is_taken_as_input(
    rig: TokenPathRig, answer: str, tool: dict[str, Any], item: dict[str, str], arguments: dict[str, str]
) -> None:
    for response in await both(rig, asked(f"<think>Hm.</think>I look.\n{answer}", tools=[tool])):
        thought, message, call = response.output
        assert (thought.type, message.type, response.output_text) == ("reasoning", "message", "I look.")
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        assert item.items() <= call.to_dict().items() and call.call_id
    output = [{"type": "input_text", "text": "[ok]"}]
    result = {"type": f"{call.type}_output", "call_id": call.call_id, "output": output}
    items = [*(each.to_dict() for each in response.output), result]
    await rig.client.responses.create(model="echo", input=items, max_output_tokens=1)
    name = "agents__spawn" if tool is AGENTS else item["name"]
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    assert prompt_of(rig) == f"I look.<think>Hm.</think><tool_call>{called}</tool_call>[ok]"


async def test_custom_tool_that_is_called_otherwise_gets_what_the_model_wrote(rig: TokenPathRig) -> None:
    for response in await both(rig, asked(PATCH_CALL.replace('"input"', '"patch"'), tools=[PATCH])):
        [call] = response.output
        assert call.type == "custom_tool_call" and json.loads(call.input) == {"patch": "*** Begin\n+größer"}


async def test_template_gets_functions_alone(rig: TokenPathRig) -> None:
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
    body = asked(CALL, tools=[TOOL, *hosted, AGENTS], max_output_tokens=100)
    response = await rig.client.responses.create(**body)
    assert [tool.type for tool in response.tools] == ["function", "namespace"] and response.tool_choice == "auto"
    names = [tool["function"]["name"] for tool in json.loads(prompt_of(rig).removeprefix(CALL))]
    assert names == ["weather", "agents__spawn"] and response.output[0].type == "function_call"


async def test_without_parallel_calls_workers_get_a_grammar_of_one_call(rig: TokenPathRig) -> None:
    for response in await both(rig, asked(f"I look.{CALL}", tools=[TOOL], parallel_tool_calls=False)):
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert response.parallel_tool_calls is False
    grammars = {start.sampling.grammar for worker in rig.workers for _, start in worker.starts}
    rules = {rule for grammar in grammars for rule in grammar.split("\n") if rule.startswith(("answer:", "content:"))}
    assert rules == {"answer: TEXT | text body"}


async def test_last_item_has_the_status_of_the_response(rig: TokenPathRig) -> None:
    for body, kind, status in (
        (asked("one two three", max_output_tokens=1), "message", "incomplete"),
        (asked(CALL, tools=[TOOL], max_output_tokens=40), "function_call", "incomplete"),
        ({**asked(""), "input": EOS}, "message", "completed"),
    ):
        for response in await both(rig, body):
            [item] = response.output
            assert (item.type, item.status, response.status) == (kind, status, status)
            reason = response.incomplete_details and response.incomplete_details.reason
            assert reason == ("max_output_tokens" if status == "incomplete" else None)


async def test_logprobs_are_those_of_messages(rig: TokenPathRig) -> None:
    """A call has none."""
    body = asked(f"I look, größer.\n{CALL}", tools=[TOOL], include=["message.output_text.logprobs"])
    whole, _ = await both(rig, body)
    message, call = whole.output
    [part] = message.content
    assert "".join(entry.token for entry in part.logprobs).startswith("I look, gr") and call.type == "function_call"
    assert whole.top_logprobs == 0 and not any(entry.top_logprobs for entry in part.logprobs)
    events = [event async for event in await rig.client.responses.create(**body, stream=True)]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.to_dict()["token"] for entry in done.logprobs] == [entry.token for entry in part.logprobs]


async def test_failed_stream_says_so(rig: TokenPathRig) -> None:
    """Until then, what the reply repeats of the request counts as held."""
    for worker in rig.workers:
        worker.pause_at = 2
    body = asked("one two three four", instructions="a" * 100, stream=True)
    events = []
    async for event in await rig.client.responses.create(**body):
        events.append(event)
        if event.type == "response.output_text.delta":
            assert 100 < rig.shares.body_bytes.num_held <= len(json.dumps(body))
            [request] = rig.token_path.pipeline.requests
            request.stop(Unavailable("the gateway is shutting down"))
    error, failed = events[-2:]
    assert error.type == "error" and (error.code, error.message) == ("unavailable", "the gateway is shutting down")
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert failed.response.error is not None and failed.response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    await eventually(lambda: rig.shares.body_bytes.num_held == 0, "the end of the request")


NAMES = {"n__f": ToolName("f", "n"), "c": ToolName("c", is_custom=True)}
Piece: TypeAlias = str | Reasoning | tuple[str, Sequence[str]]  # the last: a call of a tool, with its arguments
calls = st.tuples(
    st.sampled_from(("f", "n__f", "c")), st.sampled_from((['{"input": "', 'a"}'], ["{}"], ['{"b', '": 1']))
)
pieces = st.lists(st.text(max_size=3) | st.builds(Reasoning, st.text(min_size=1, max_size=3)) | calls, max_size=8)


def parts_of(answer: Sequence[Piece]) -> list[Part]:
    parts: list[Part] = []
    for piece in answer:
        if isinstance(piece, tuple):
            index = sum(isinstance(part, CallBegin) for part in parts)
            parts.append(CallBegin(index, f"call-{index}", piece[0]))
            parts += [CallArguments(index, text) for text in piece[1]]
        else:
            parts.append(piece)
    return parts


def replayed(events: list[Event]) -> list[dict[str, Any]]:
    """The items as a client sees them that joins what the events add."""
    items: list[dict[str, Any]] = []
    for encoded in events:
        kind, event = encoded.type.decode().removeprefix("response."), json.loads(b"{%s}" % encoded.fields)
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(dict(event["item"]))
            continue
        item = items[event["output_index"]]
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                assert item["content"] == []
                item["content"] = [dict(event["part"])]
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][0]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert item["content"] == [event["part"]]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "function_call_arguments.done":
                assert item["arguments"] == event["arguments"]
            case "custom_tool_call_input.done":
                assert item["input"] == event["input"]
            case "output_item.done":
                assert item | {"status": event["item"]["status"]} == event["item"]
                item["status"] = event["item"]["status"]
            case other:
                raise AssertionError(other)
    return items


@given(pieces, st.sampled_from(("completed", "incomplete")))
def test_events_add_up_to_the_items(answer: list[Piece], status: str) -> None:
    output = Output(NAMES)
    events = [event for part in parts_of(answer) for event in output.add(part)] + output.end(status)
    assert replayed(events) == output.items
    assert len({item["id"] for item in output.items}) == len(output.items)

    said = [piece for piece in answer if piece]
    expected: list[str] = []
    for kind, run in groupby(said, type):
        texts = [shown(piece) for piece in run]
        expected += texts if kind is tuple else ["".join(texts)]
    assert [text_of(item) for item in output.items] == (expected or [""])
    assert all(item["status"] == "completed" for item in output.items[:-1] if item["type"] in ("message", "reasoning"))
    last = output.items[-1]
    is_whole = last["type"].endswith("call") and text_of(last) != '{"b": 1'
    assert last["status"] == ("completed" if is_whole else status)


def shown(piece: Piece) -> str:
    match piece:
        case str(text) | Reasoning(text):
            return text
        case (name, texts):
            arguments = "".join(texts)
            return "a" if name == "c" and "input" in arguments else arguments


def text_of(item: dict[str, Any]) -> str:
    match item["type"]:
        case "function_call":
            text: str = item["arguments"]
        case "custom_tool_call":
            text = item["input"]
        case _:
            text = item["content"][0]["text"]
    return text

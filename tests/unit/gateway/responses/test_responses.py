"""The Responses API over real HTTP, with the official client.

The model repeats its prompt, which begins with the answer.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.support.sample_tokenizers import EOS
from tests.support.wait import eventually
from tests.unit.gateway.openai.test_reasoning import TEMPLATE as REASONING_TEMPLATE
from tests.unit.gateway.openai.test_tools import ARGUMENTS, CALL, PARAMETERS, TEMPLATE, billed
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.errors import RateLimited, Unavailable

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
PATCH_CALL = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+größer"}}\n</tool_call>'
SPAWN_CALL = '<tool_call>\n{"name": "agents__spawn", "arguments": {"task": "a"}}\n</tool_call>'
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [{"type": "function", "name": "spawn", "parameters": PARAMETERS}],
}


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


def asked(answer: str, **fields: Any) -> dict[str, Any]:
    """A request that is answered by ``answer``."""
    return {"model": "echo", "input": answer + EOS, "max_output_tokens": 200, **fields}


async def both(rig: TokenPathRig, body: dict[str, Any]) -> tuple[Any, Any]:
    """The answer at once, and the one of a stream; both are billed as they say."""
    whole = await rig.client.responses.create(**body)
    *_, last = [event async for event in await rig.client.responses.create(**body, stream=True)]
    assert last.type in ("response.completed", "response.incomplete")
    streamed = last.response
    for response in (whole, streamed):
        assert response.usage is not None and response.usage.output_tokens == billed(rig, response.id)
    assert without_ids(whole) == without_ids(streamed)
    return whole, streamed


def without_ids(response: Response) -> dict[str, Any]:
    shown = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in shown["output"]:
        del item["id"]
        item.pop("call_id", None)
    return shown


async def test_text_is_answered_as_openai_does(rig: TokenPathRig) -> None:
    body = asked("größer 🔥", instructions="", metadata={"a": "b"}, temperature=0.7, store=True, service_tier="flex")
    for response in await both(rig, body):
        [message] = response.output
        assert message.type == "message" and (message.role, message.status) == ("assistant", "completed")
        assert response.output_text == "größer 🔥" and response.id.startswith("resp_")
        assert (response.object, response.status, response.error) == ("response", "completed", None)
        assert (response.model, response.temperature, response.service_tier) == ("acme/echo", 0.7, "flex")
        assert response.metadata == {"a": "b"} and response.model_dump()["store"] is False
        usage = response.usage
        assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)


async def test_helpers_of_the_client_work(rig: TokenPathRig) -> None:
    async with rig.client.responses.stream(**asked(CALL, tools=[TOOL])) as stream:
        kinds = [event.type async for event in stream]
        [call] = (await stream.get_final_response()).output
    assert call.type == "function_call" and call.arguments == ARGUMENTS
    assert "response.function_call_arguments.delta" in kinds


async def test_usage_has_cached_tokens(rig: TokenPathRig) -> None:
    for worker in rig.workers:
        worker.num_cached = 3
    for response in await both(rig, asked("one two three")):
        assert response.usage is not None and response.usage.input_tokens_details.cached_tokens == 3


async def test_events_come_in_their_order(rig: TokenPathRig) -> None:
    calls = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "c", "arguments": {"input": "a"}}</tool_call>'
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]
    body = asked(f"I look.\n{calls}", tools=tools, max_output_tokens=120, stream=True)
    events = [event async for event in await rig.client.responses.create(**body)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [kind for kind, _ in groupby(event.type.removeprefix("response.") for event in events)]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == "I look."
    places = [event.output_index for event in events[2:-1]]
    assert places == sorted(places) and set(places) == {0, 1, 2}
    last = events[-1]
    assert last.type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert last.response.output == done
    first = events[0]
    assert first.type == "response.created" and first.response.id == last.response.id
    assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)


async def test_function_calls_and_their_results(rig: TokenPathRig) -> None:
    for response in await both(rig, asked(f"I look.\n{CALL}\n{CALL}", tools=[TOOL])):
        message, first, second = response.output
        assert message.type == "message" and response.output_text == "I look."
        assert first.type == second.type == "function_call" and first.call_id != second.call_id
        assert (first.name, first.arguments, first.namespace) == ("weather", ARGUMENTS, None)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "[rain]"} for call in (first, second)
    ]
    body = asked("", tools=[TOOL], max_output_tokens=1)
    await rig.client.responses.create(**{**body, "input": [*response.output, *results]})
    called = json.dumps({"name": "weather", "arguments": json.loads(ARGUMENTS)}, ensure_ascii=False)
    calls = f"<tool_call>{called}</tool_call>" * 2
    assert prompt_of(rig).startswith(f"I look.{calls}[rain][rain][{{")


def prompt_of(rig: TokenPathRig) -> str:
    """The text of the last prompt."""
    starts = [start for worker in rig.workers for _, start in worker.starts if start.prompt]
    last = max(starts, key=lambda start: [opened.request_id for opened in rig.ports.opened].index(start.key.request_id))
    text: str = rig.tokenizer.decode(list(last.prompt))
    return text


async def test_reasoning_is_an_item(make_rig: MakeRig) -> None:
    rig = await make_rig(template=REASONING_TEMPLATE)
    for response in await both(rig, asked("<think>\nThe 🔥 is hot.\n</think>\n\nHot.")):
        thought, _ = response.output
        assert thought.type == "reasoning" and [part.text for part in thought.content] == ["The 🔥 is hot."]
        assert thought.content[0].type == "reasoning_text" and response.output_text == "Hot."
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    await rig.client.responses.create(**{**asked("", max_output_tokens=1), "input": response.output})
    assert prompt_of(rig) == "Hot.<think>The 🔥 is hot.</think>"
    events = [event async for event in await rig.client.responses.create(**asked("<think>a</think>b", stream=True))]
    kinds = [kind for kind, _ in groupby(event.type.removeprefix("response.") for event in events)]
    assert kinds[2:8] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
    ]


async def test_call_that_is_cut_is_incomplete(rig: TokenPathRig) -> None:
    for response in await both(rig, asked(CALL, tools=[TOOL], max_output_tokens=40)):
        [call] = response.output
        assert (call.type, call.status, response.status) == ("function_call", "incomplete", "incomplete")
        assert call.arguments and ARGUMENTS.startswith(call.arguments)


async def test_custom_tool_takes_text(rig: TokenPathRig) -> None:
    for response in await both(rig, asked(PATCH_CALL, tools=[PATCH])):
        [call] = response.output
        assert call.type == "custom_tool_call" and call.call_id
        assert (call.name, call.input) == ("apply_patch", "*** Begin\n+größer")
    result = {
        "type": "custom_tool_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "[ok]"}],
    }
    body = asked("", max_output_tokens=1)
    await rig.client.responses.create(**{**body, "input": [call.model_dump(), result]})
    called = {"name": "apply_patch", "arguments": {"input": "*** Begin\n+größer"}}
    assert prompt_of(rig) == f"<tool_call>{json.dumps(called, ensure_ascii=False)}</tool_call>[ok]"


async def test_custom_tool_that_is_called_otherwise_gets_what_the_model_wrote(rig: TokenPathRig) -> None:
    answer = PATCH_CALL.replace('"input"', '"patch"')
    for response in await both(rig, asked(answer, tools=[PATCH])):
        [call] = response.output
        assert call.type == "custom_tool_call" and json.loads(call.input) == {"patch": "*** Begin\n+größer"}


async def test_function_of_a_namespace(rig: TokenPathRig) -> None:
    for response in await both(rig, asked(SPAWN_CALL, tools=[AGENTS])):
        [call] = response.output
        assert call.type == "function_call" and (call.name, call.namespace) == ("spawn", "agents")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "[ok]"}
    await rig.client.responses.create(**{**asked("", max_output_tokens=1), "input": [call.model_dump(), result]})
    called = {"name": "agents__spawn", "arguments": {"task": "a"}}
    assert prompt_of(rig) == f"<tool_call>{json.dumps(called)}</tool_call>[ok]"


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
async def test_template_gets_tools_unless_none_may_be_called(rig: TokenPathRig, tool_choice: str) -> None:
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
    body = asked(CALL, tools=[TOOL, *hosted, AGENTS], tool_choice=tool_choice, max_output_tokens=100)
    response = await rig.client.responses.create(**body)
    assert [tool.type for tool in response.tools] == ["function", "namespace"] and response.tool_choice == tool_choice
    shown = prompt_of(rig).removeprefix(CALL)
    if tool_choice == "none":
        assert shown == "" and response.output_text == CALL
        return
    names = [tool["function"]["name"] for tool in json.loads(shown)]
    assert names == ["weather", "agents__spawn"] and response.output[0].type == "function_call"


async def test_without_parallel_calls_workers_get_a_grammar_of_one_call(rig: TokenPathRig) -> None:
    body = asked(f"I look.{CALL}", tools=[TOOL], parallel_tool_calls=False)
    for response in await both(rig, body):
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert response.parallel_tool_calls is False
    grammars = {start.sampling.grammar.split("\n")[1] for worker in rig.workers for _, start in worker.starts}
    assert grammars == {"answer: /(.|\\n)*/ | text body"}


async def test_cut_answer_is_incomplete(rig: TokenPathRig) -> None:
    for response in await both(rig, asked("one two three", max_output_tokens=1)):
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens" and response.max_output_tokens == 1
        [message] = response.output
        assert message.type == "message" and message.status == "incomplete"


async def test_empty_answer_is_a_message(rig: TokenPathRig) -> None:
    for response in await both(rig, {**asked(""), "input": EOS}):
        [message] = response.output
        assert message.type == "message" and response.output_text == ""


async def test_extensions_are_those_of_chat(rig: TokenPathRig) -> None:
    response = await rig.client.responses.create(
        **asked("one two three", extra_body={"stop": [" two"], "top_k": 3, "seed": 7})
    )
    assert response.output_text == "one" and response.status == "completed"
    [sampling] = {(start.sampling.top_k, start.sampling.seed) for w in rig.workers for _, start in w.starts}
    assert sampling == (3, 7)


async def test_errors_have_the_client_s_classes(rig: TokenPathRig) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await rig.client.responses.create(**{**asked(""), "model": "none"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await rig.client.with_options(api_key="tr-none").responses.create(**asked(""))
    rig.ports.refusal = RateLimited("too many", retry_after_s=3)
    with pytest.raises(openai.RateLimitError) as refused:
        await rig.client.responses.create(**asked("", stream=True))
    assert refused.value.response.headers["retry-after"] == "3"
    assert (await rig.http.get("/v1/responses")).status_code == 405


async def test_context_length_is_about_the_input(rig: TokenPathRig) -> None:
    for fields, param in (({"input": "one " * 600}, "input"), ({"max_output_tokens": 9999}, "max_output_tokens")):
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.client.responses.create(**asked("", **fields))
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


async def test_integers_beyond_the_text_process_are_named(rig: TokenPathRig) -> None:
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": 1 << 64})}
    tool = {**TOOL, "parameters": {"maximum": 1 << 64}}
    for fields, param in (({"input": [called]}, "input"), ({"tools": [tool]}, "tools")):
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.client.responses.create(**asked("", **fields))
        assert caught.value.param == param and "contains an integer" in caught.value.message


async def test_failed_stream_says_so(rig: TokenPathRig) -> None:
    for worker in rig.workers:
        worker.pause_at = 2
    stream = await rig.client.responses.create(**asked("one two three four", stream=True))
    events = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            [request] = rig.token_path.pipeline.requests
            request.stop(Unavailable("the gateway is shutting down"))
    error, failed = events[-2:]
    assert error.type == "error" and (error.code, error.message) == ("unavailable", "the gateway is shutting down")
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert failed.response.error is not None and failed.response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_waking_model_keeps_the_stream_alive_by_comments(make_rig: MakeRig) -> None:
    rig = await make_rig(template=TEMPLATE, keep_alive_s=0.05)
    rig.ports.may_open.clear()
    lines: list[str] = []
    async with rig.http.stream("POST", "/v1/responses", json=asked("one two", stream=True)) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if lines.count(": waiting") == 2:
                break
    named = [line for line in lines if line.startswith(("event: ", ":"))]
    assert named[:3] == ["event: response.created", "event: response.in_progress", ": waiting"]


async def test_what_the_reply_repeats_counts_as_held_until_its_end(rig: TokenPathRig) -> None:
    for worker in rig.workers:
        worker.pause_at = 1
    body = asked("one two", instructions="a" * 100, stream=True)
    async with rig.http.stream("POST", "/v1/responses", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("event: response.output_text.delta"):
                break
        held = rig.shares.body_bytes.num_held
        assert 100 < held <= len(json.dumps(body))
    await eventually(lambda: rig.shares.body_bytes.num_held == 0, "the end of the request")


async def test_client_that_leaves_pays_for_what_it_got(rig: TokenPathRig) -> None:
    for worker in rig.workers:
        worker.pause_at = 3
    async with rig.http.stream("POST", "/v1/responses", json=asked("one two three four", stream=True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("event: response.output_text.delta"):
                break
    await eventually(lambda: rig.ports.settled, "the bill of the client that left")
    [(request_id, [usage])] = rig.ports.settled.items()
    assert request_id.startswith("resp_") and 1 <= usage.num_output_tokens <= 3 and usage.cause == "cancelled"


async def test_reply_repeats_the_format(rig: TokenPathRig) -> None:
    asked_format = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False}
    for given, repeated in ((None, {"type": "text"}), (asked_format, asked_format)):
        body = asked("hi") | ({} if given is None else {"text": {"format": given}})
        reply = (await rig.http.post("/v1/responses", json=body)).json()
        assert reply["text"] == {"format": repeated}

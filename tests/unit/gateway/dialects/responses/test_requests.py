from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.unit.gateway.dialects.test_params import params_of
from torchrelay.gateway.dialects.responses.input_items import Item, messages_of
from torchrelay.gateway.dialects.responses.replies import format_of
from torchrelay.gateway.dialects.responses.requests import decode_body
from torchrelay.gateway.dialects.responses.requests import params_of as params_and_tools
from torchrelay.gateway.inference.core import ChatMessage
from torchrelay.gateway.inference.parameter_ranges import MAX_MESSAGES

CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": "r"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}

# The fields that Codex sends, with its kinds of tools and messages.
CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "You edit code.",
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed", "namespace": "agents"},
        {
            "type": "custom_tool_call",
            "call_id": "p",
            "name": "apply_patch",
            "input": "*** Begin",
            "status": "completed",
        },
        {**RESULT, "output": [{"type": "input_text", "text": "r"}, {"type": "input_text", "text": "s"}]},
        {"type": "custom_tool_call_output", "call_id": "p", "output": "Done"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "The mode changed"}]},
    ],
    "tools": [
        {**FUNCTION, "strict": False},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'},
        },
        {
            "type": "namespace",
            "name": "agents",
            "description": "Helpers.",
            "tools": [{**FUNCTION, "description": "Spawns."}, {"type": "custom", "name": "note"}],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session": "s"},
}


def messages(*items: Any, **fields: Any) -> list[ChatMessage]:
    return list(params_of("responses", input=list(items), **fields).messages or ())


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_request_of_codex() -> None:
    body = decode_body(json.dumps(CODEX).encode())
    params, tools = params_and_tools(body)
    assert params.messages == (
        said("system", "You edit code.\n\nRules"),
        said("user", "Fix it"),
        {
            **said("assistant", "I look"),
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "agents__f", "arguments": {"a": 1}}},
                {
                    "id": "p",
                    "type": "function",
                    "function": {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
                },
            ],
        },
        {**said("tool", "r\ns"), "tool_call_id": "c"},
        {**said("tool", "Done"), "tool_call_id": "p"},
        said("developer", "The mode changed"),
    )
    functions = [tool["function"] for tool in params.tools]
    assert [function["name"] for function in functions] == ["f", "apply_patch", "agents__f", "agents__note"]
    [grammar] = functions[1]["parameters"]["properties"].values()
    assert grammar["type"] == "string" and '\nstart: "*** Begin"' in grammar["description"]
    assert functions[1]["parameters"]["required"] == ["input"]
    assert functions[2]["description"] == "agents: Helpers.\n\nSpawns." and "description" not in functions[3]
    settings = json.loads(b"{%s}" % format_of(body, tools).settings)
    assert settings["tools"] == CODEX["tools"][:3], "hosted tools are left out"
    assert (settings["instructions"], settings["prompt_cache_key"]) == (CODEX["instructions"], "k")


def test_roles_and_kinds_of_text() -> None:
    texts = [{"type": kind, "text": kind[0]} for kind in ("input_text", "output_text", "text")]
    assert messages(said("user", texts)) == [said("user", "i\no\nt")]
    assert messages(said("user", "a"), said("system", "b")) == [said("user", "a"), said("system", "b")]
    assert messages(said("user", "a"), instructions="b") == [said("system", "b"), said("user", "a")]
    assert messages(said("developer", "a"), said("system", "b"), said("user", "c")) == [
        said("developer", "a\n\nb"),
        said("user", "c"),
    ]


def test_what_an_assistant_says_and_calls_is_a_message_until_its_results() -> None:
    first, second = {**CALL, "call_id": "1"}, {**CALL, "call_id": "2"}
    listed = messages(
        *(said("user", "a"), first, {**RESULT, "call_id": "1"}),
        *(second, said("assistant", "b"), {**RESULT, "call_id": "2"}),
        *(said("assistant", "c"), said("assistant", None), said("assistant", "d")),
    )
    assert [message["role"] for message in listed] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["content"] for message in listed] == ["a", "", "r", "b", "r", "c\nd"]
    assert [len(message.get("tool_calls", ())) for message in listed] == [0, 1, 0, 1, 0, 0]


def test_reasoning_is_that_of_the_answer_after_it() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"}
    user = said("user", "a")
    assert messages(user, thought, said("assistant", "b"), user) == [
        user,
        {**said("assistant", "b"), "reasoning_content": "t"},
        user,
    ]
    [_, called] = messages(user, thought, CALL)
    assert called["reasoning_content"] == "t" and called["tool_calls"]
    assert messages(user, thought, user, summary, said("assistant", "b")) == [user, user, said("assistant", "b")]


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_many_items_are_joined_in_linear_time(role: str) -> None:
    """Copies of the text so far would be 60 GB, which would take minutes."""
    items = [said(role, "x" * 240)] * MAX_MESSAGES
    [message], _ = messages_of(msgspec.convert(items, list[Item]), None)
    assert message["content"].count("x") == 240 * MAX_MESSAGES


def test_content_that_no_model_reads_has_a_remark() -> None:
    parts = [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": "data:x"}]
    viewed = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_id": "f"}]}
    params = params_of("responses", input=[said("user", parts), CALL, viewed])
    asked, _, result = params.messages or ()
    assert asked["content"] == "Look:\n[image left out: this model reads text only]"
    assert result["content"] == "[file left out: this model reads text only]" and params.left_out == ("file", "image")


def test_screenshots_are_no_text() -> None:
    shot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
    seen = {"type": "computer_call_output", "call_id": "c", "output": shot}
    viewed = {"type": "function_call_output", "call_id": "c", "output": {"type": "input_image", "image_url": "data:x"}}
    params = params_of("responses", input=[said("user", "a"), seen, CALL, viewed])
    assert "data:" not in str(params.messages) and params.left_out == ("image",)


def test_records_of_hosted_tools_are_shown_as_text() -> None:
    searched = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "relay"}}
    refused = said("assistant", [{"type": "refusal", "refusal": "I cannot."}])
    _, answer, *_ = messages(said("user", ""), searched, {"type": "compaction", "encrypted_content": "x"}, refused)
    assert answer["content"] == '[web_search_call: {"action":{"type":"search","query":"relay"}}]\nI cannot.'


def test_arguments_that_are_no_object_are_shown_as_they_were_written() -> None:
    [message] = messages({**CALL, "arguments": "{broken"})
    assert message["tool_calls"][0]["function"]["arguments"] == "{broken"

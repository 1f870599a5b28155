from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.inference.answers.parts import CallArguments, CallBegin, Part, Reasoning
from torchrelay.gateway.responses.events import Event
from torchrelay.gateway.responses.output import Output
from torchrelay.gateway.responses.tools import ToolName

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

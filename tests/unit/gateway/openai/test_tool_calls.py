"""The calls in an answer's text, however the text is split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.openai.tool_calls import ToolCall, ToolCallParser, divided

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln",  "days": 2.0}}\n</tool_call>'
TIME = '<tool_call>{"arguments": {}, "name": "time"}</tool_call>'


def names_and_arguments(calls: list[ToolCall]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain\n", "plain\n", []),
        (WEATHER, "", [("weather", '{"city": "Köln",  "days": 2.0}')]),
        (f"I look.\n\n{WEATHER}\n{TIME}\n", "I look.", [("weather", '{"city": "Köln",  "days": 2.0}'), ("time", "{}")]),
        (f"{TIME} done", " done", [("time", "{}")]),
        ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
        ('<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', "", [("a", '{"b": 1}')]),
        ("a <tool_cal", "a <tool_cal", []),
        ("<<tool_call> <tool", "<<tool_call> <tool", []),
        ('<tool_call>{"name": "a"}', '<tool_call>{"name": "a"}', []),
        ("<tool_call>a</tool_call>", "<tool_call>a</tool_call>", []),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', None, []),
        ('<tool_call>{"name": 1}</tool_call>', None, []),
        (f"<tool_call>a</tool_call>{TIME}", "<tool_call>a</tool_call>", [("time", "{}")]),
        (f"<tool_call>{'[' * 100_000}</tool_call>", None, []),
    ],
)
def test_text_divides_into_content_and_calls(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    shown, made = divided(text)
    assert shown == (text if content is None else content) and names_and_arguments(made) == calls
    assert len({call.id for call in made}) == len(made)


PIECES = st.sampled_from([WEATHER, TIME, "<tool_call>", "</tool_call>", "<tool", " \n", "word", '{"name": "a"}', "🔥"])


@given(st.lists(PIECES, max_size=6).map("".join), st.data())
def test_split_changes_nothing(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    parser = ToolCallParser()
    parts = [part for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for part in parser.push(text[a:b])]
    content = "".join(part for part in parts if isinstance(part, str)) + parser.flush()
    calls = [part for part in parts if isinstance(part, ToolCall)]
    whole, made = divided(text)
    assert (content, names_and_arguments(calls)) == (whole, names_and_arguments(made))
    assert parser.num_calls == len(calls)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_content_is_shown_at_once() -> None:
    parser = ToolCallParser()
    assert [list(parser.push(piece)) for piece in ("a", " b <", "c ", "<tool_call>")] == [["a"], [" b"], [" <c"], []]

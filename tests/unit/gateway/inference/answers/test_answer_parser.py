"""Reasoning at the beginning of answers."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cpu_steps import short_step
from torchrelay.gateway.inference.answers.answer_parser import AnswerParser
from torchrelay.gateway.inference.answers.parts import (
    CallArguments,
    CallBegin,
    ParsedAnswer,
    Reasoning,
    joined,
    parameter_types,
)
from torchrelay.gateway.inference.answers.syntax import (
    COMMAND,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
    QWEN_CODER,
    AnswerSyntax,
    CallSyntax,
)
from torchrelay.gateway.inference.answers.value_types import allowed_types

THINKS = ("<think>", "</think>")
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "begins_thinking", "reasoning", "content", "num_calls"),
    [
        ("<think>\nI see.\n\nSo.\n</think>\n\nYes.\n", False, "I see.\n\nSo.", "Yes.\n", 0),
        ("\nI see.\n</think>\n\nYes.", True, "I see.", "Yes.", 0),
        ("<think>I see.</think>Yes.", True, "I see.", "Yes.", 0),
        ("I see. ", True, "I see.", "", 0),
        (" Yes. <think>no</think>", False, "", " Yes. <think>no</think>", 0),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes.", 0),
        ("</think>Yes.", True, "", "Yes.", 0),
        ("<thin", False, "", "<thin", 0),
        ("<think>a</thin", False, "a</thin", "", 0),
        (f"<think>Not {CALL}</think>\n{CALL}", False, f"Not {CALL}", "", 1),
        (f"{CALL}", False, "", "", 1),
        (" \n", False, "", " \n", 0),
        ("", True, "", "", 0),
    ],
)
def test_reasoning_precedes_content_and_calls(
    text: str, begins_thinking: bool, reasoning: str, content: str, num_calls: int
) -> None:
    for pieces in ([text], list(text)):
        parser = AnswerParser(AnswerSyntax(HERMES, THINKS, begins_thinking), {"time": {}})
        answer = joined([part for piece in pieces for part in parser.push(piece)] + parser.flush())
        assert (answer.reasoning, answer.content, len(answer.calls)) == (reasoning, content, num_calls)
        assert parser.num_calls == num_calls


def test_reasoning_is_shown_at_once_and_its_tokens_are_counted() -> None:
    parser = AnswerParser(AnswerSyntax(thoughts=THINKS), None)
    assert [
        parser.push(token) for token in ("<think>", "\n", "I ", "see", "", ".\n", "</think>", "\n\n", "Yes", ".")
    ] == [[], [], [Reasoning("I")], [Reasoning(" see")], [], [Reasoning(".")], [], [], ["Yes"], ["."]]
    assert parser.num_reasoning_tokens == 7, "with both markers"

    split = AnswerParser(AnswerSyntax(thoughts=THINKS), None)
    assert [split.push(token) for token in ("<", "think", ">a", "</think>", "\n", "b")][-1] == ["b"]
    assert split.num_reasoning_tokens == 4, "also those of a split opening"
    plain = AnswerParser(AnswerSyntax(thoughts=THINKS), None)
    assert [plain.push(token) for token in ("Y", "es")] == [["Y"], ["es"]] and not plain.num_reasoning_tokens


def test_calls_are_content_if_the_request_has_no_tools() -> None:
    assert AnswerParser(AnswerSyntax(HERMES), None).push(CALL) == [CALL]


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ('{"a": "[TOOL_CALLS]time{}"}', '{"a": "[TOOL_CALLS]time{}"}', 0),
        (" \n[TOOL_CALLS]time[ARGS]{}", "", 1),
        ("<think>a</think>\n[TOOL_CALLS]time{}", "", 1),
        (" [TOOL", " [TOOL", 0),
        (" ", " ", 0),
    ],
)
def test_content_with_a_format_has_no_calls(text: str, content: str, num_calls: int) -> None:
    for pieces in ([text], list(text)):
        parser = AnswerParser(AnswerSyntax(MISTRAL, THINKS, calls_alone=True), {"time": {}})
        answer = joined([part for piece in pieces for part in parser.push(piece)] + parser.flush())
        assert (answer.content, len(answer.calls)) == (content, num_calls)


TOOLS = [
    {"type": "function", "function": {"name": "time"}},
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}},
        },
    },
]
TYPES = parameter_types(TOOLS)

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln",  "days": 2.0}}\n</tool_call>'
TIME = '<tool_call>{"arguments": {}, "name": "time"}</tool_call>'
CITY = '{"city": "Köln",  "days": 2.0}'

HERMES_CASES = [
    ("plain\n", "plain\n", []),
    (WEATHER, "", [("weather", CITY)]),
    (f"I look.\n\n{WEATHER}\n{TIME}\n", "I look.", [("weather", CITY), ("time", "{}")]),
    (f"{TIME} done", " done", [("time", "{}")]),
    ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    ('<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', "", [("a", '{"b": 1}')]),
    *(
        (f'<tool_call>{{"name": "time", "arguments": {nothing}}}</tool_call>', "", [("time", "{}")])
        for nothing in ("null", '""', '" "', '"null"')
    ),
    ("a <tool_cal", "a <tool_cal", []),
    ("<<tool_call> <tool", "<<tool_call> <tool", []),
    ('<tool_call>{"name": "a"} \n', "", [("a", "{}")]),
    ('<tool_call>{"name": "a"}\n</tool_ca', "", [("a", "{}")]),
    ('<tool_call>{"name": "a", "arguments": {', None, []),
    ("<tool_call>a</tool_call>", None, []),
    ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', None, []),
    ('<tool_call>{"name": 1}</tool_call>', None, []),
    (f" <tool_call>a</tool_call>{TIME}", " <tool_call>a</tool_call>", [("time", "{}")]),
    (f"<tool_call>{'[' * 100_000}</tool_call>", None, []),
    (f'<tool_call>{{"a": {"[" * 100_000}</tool_call>', None, []),
    # a call of a declared tool is shown as it is written, and stays one
    ('<tool_call>{"name": "weather", "arguments": {"city": "K', "", [("weather", '{"city": "K')]),
    ('<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>', "", [("weather", '{"city": }')]),
    ('<tool_call>{"name": "time", "arguments": {}, "id": {"a": "}"}}</tool_call>.', ".", [("time", "{}")]),
    (
        '<tool_call>{"name": "time", "arguments": {"a": "</tool_call>\\"}"}}',
        "",
        [("time", '{"a": "</tool_call>\\"}"}')],
    ),
    (f"<tool_call>[{TIME[11:-12]}, {WEATHER[12:-13]}]</tool_call>", "", [("time", "{}"), ("weather", CITY)]),
]
LLAMA_CASES = [
    ('{"name": "weather", "parameters": {"city": "Köln"}}', "", [("weather", '{"city": "Köln"}')]),
    ('\n<|python_tag|>{"name": "time", "parameters": {}}', "", [("time", "{}")]),
    ('{"name": "time", "parameters": {}}; {"name": "b", "arguments": {}};', ";", [("time", "{}"), ("b", "{}")]),
    ('{"type": "function", "name": "time", "parameters": {}}', "", [("time", "{}")]),
    ('I look. <|python_tag|>{"name": "time", "parameters": {}}', "I look.", [("time", "{}")]),
    ('{"city": "Köln"}', None, []),
    ('Text {"name": "time", "parameters": {}}', None, []),
    ('<|python_tag|>search.call(query="a")', None, []),
    ('{"name": "time", "parameters": {}}\nDone.', "\nDone.", [("time", "{}")]),
    (" {", None, []),
]
MISTRAL_CASES = [
    (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "b", "arguments": {}}]',
        "",
        [("weather", '{"city": "Köln"}'), ("b", "{}")],
    ),
    ('I look. [TOOL_CALLS]weather[ARGS]{"city": "Köln"}', "I look.", [("weather", '{"city": "Köln"}')]),
    ('[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]b[CALL_ID]a1[ARGS]{"c": 1}', "", [("time", "{}"), ("b", '{"c": 1}')]),
    ("[TOOL_CALLS]time{}", "", [("time", "{}")]),
    ('[TOOL_CALLS]time[ARGS]{"a": [1', "", [("time", '{"a": [1')]),
    ('[TOOL_CALLS]b[ARGS]{"a": [1', None, []),
    ("[TOOL_CALLS] [1]", None, []),
    ('[TOOL_CALLS][{"name": "time", "arguments": {}}, 1]', ", 1]", [("time", "{}")]),
    (f"[TOOL_CALLS]{'a' * 300}{{}}", None, []),
    ("[TOOL", None, []),
]
XML_CASES = [
    (
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("weather", '{"city": "12", "days": 2}')],
    ),
    ("<tool_call><function=time></function></tool_call>\n", "", [("time", "{}")]),
    (
        "<tool_call><function=b><parameter=c>[1]</parameter><parameter=d>x\ny</parameter></function></tool_call>!",
        "!",
        [("b", '{"c": [1], "d": "x\\ny"}')],
    ),
    ("<tool_call><function=weather><parameter=city>\nK\n</param", "", [("weather", '{"city": "K\\n')]),
    ("<tool_call><function=weather><parameter=days>\n2", "", [("weather", '{"days": 2')]),
    ("<tool_call><function=weather><parameter=ci", "", [("weather", "{")]),
    ("<tool_call><function=weather>\n<para", "", [("weather", "{")]),
    ("<tool_call><function=time></func", "", [("time", "{")]),
    ("<tool_call><function=time> no", "no", [("time", "{")]),
    ("<tool_call><function=b><parameter=city>K", None, []),
    ("<tool_call><function=b></tool_call>", None, []),
    ("<tool_call> {}", None, []),
    ("<tool_call><function=b><parameter=c>NaN</parameter></function>", "", [("b", '{"c": "NaN"}')]),
]
COMMAND_CASES = [
    (
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "time", "parameters": {}},'
        ' {"tool_name": "weather", "parameters": {"c": 1}}\n]<|END_ACTION|>',
        "",
        [("time", "{}"), ("weather", '{"c": 1}')],
    ),
    ('<|START_ACTION|>{"name": "time", "parameters": {}}<|END_ACTION|>', None, []),
]
PHI_CASES = [
    ('<|tool_call|>[{"name": "time", "arguments": {}}]', "", [("time", "{}")]),
    ('<|tool_call|>[{"name": "b", "arguments": {}}]<|/tool_call|>!', "!", [("b", "{}")]),
]
CASES = [
    (syntax, *case)
    for syntax, cases in (
        (HERMES, HERMES_CASES),
        (LLAMA, LLAMA_CASES),
        (MISTRAL, MISTRAL_CASES),
        (QWEN_CODER, XML_CASES),
        (COMMAND, COMMAND_CASES),
        (PHI, PHI_CASES),
    )
    for case in cases
]


def parsed(syntax: AnswerSyntax, pieces: list[str]) -> ParsedAnswer:
    parser = AnswerParser(syntax, TYPES)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    answer = joined(parts)
    assert [part.index for part in parts if isinstance(part, CallBegin)] == list(range(parser.num_calls))
    assert len({call.id for call in answer.calls}) == len(answer.calls) == parser.num_calls
    return answer


def divided(syntax: AnswerSyntax, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    answer = parsed(syntax, pieces)
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_text_divides_into_content_and_calls(
    syntax: CallSyntax, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = ("", text if content is None else content, calls)
    assert divided(AnswerSyntax(syntax), [text]) == expected
    if len(text) < 1000:
        assert divided(AnswerSyntax(syntax), list(text)) == expected


FRAGMENTS = [
    *(text for _, text, _, _ in CASES if len(text) < 1000),
    *re.split(r"(\W)", "".join(text for _, text, _, _ in CASES if len(text) < 1000)),
    *("<think>", "</think>", " \n", "word", '{"name": "time", "arguments": ', "🔥", ";", ", ", "\\", '"'),
]
SYNTAXES = [
    AnswerSyntax(calls, thoughts, is_inside)
    for calls in (HERMES, LLAMA, MISTRAL, QWEN_CODER, COMMAND, None)
    for thoughts, is_inside in ((None, False), (("<think>", "</think>"), False), (("<think>", "</think>"), True))
]


@given(st.sampled_from(SYNTAXES), st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.data())
def test_split_changes_nothing(syntax: AnswerSyntax, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = divided(syntax, [text])
    assert divided(syntax, pieces) == divided(syntax, list(text)) == whole
    for name, arguments in whole[2]:
        assert name in TYPES or isinstance(json.loads(arguments), dict)


def test_content_and_arguments_are_shown_as_they_arrive() -> None:
    parser = AnswerParser(AnswerSyntax(HERMES), TYPES)
    assert [parser.push(piece) for piece in ("a", " b <", "c ", "<tool_call>")] == [["a"], [" b"], [" <c"], []]
    for syntax, head, end in (
        (HERMES, '<tool_call>{"name": "weather", "arguments": ', "}</tool_call>"),
        (LLAMA, '<|python_tag|>{"name": "weather", "parameters": ', "}"),
        (MISTRAL, "[TOOL_CALLS]weather[ARGS]", ""),
    ):
        parser = AnswerParser(AnswerSyntax(syntax), TYPES)
        assert parser.push(head) == []
        begin, opened = parser.push("{")
        assert isinstance(begin, CallBegin) and (begin.index, begin.name) == (0, "weather")
        assert opened == CallArguments(0, "{")
        assert parser.push('"city": "K') == [CallArguments(0, '"city": "K')]
        assert parser.push(f'öln"}}{end}') == [CallArguments(0, 'öln"}')]
        assert parser.flush() == []


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        *(
            (schema, written, written)
            for schema in (
                TEXT,
                {"anyOf": [TEXT, {"type": "null"}]},
                {"oneOf": [{"type": "null"}, TEXT]},
                {"type": ["string", "null"]},
                {"$ref": "#/$defs/text"},
                {"allOf": [{"$ref": "#/$defs/nullable"}], "description": "a name"},
                {"enum": ["12345", "true", "2024"]},
                {"const": "12345"},
                {"type": ["string", "integer"], "enum": ["true", "12345"]},
            )
            for written in ("12345", "true", "2024", '"a"', "[1]")
        ),
        (TEXT, "null", "null"),
        (TEXT, "None", "None"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": ["boolean", "null"]}, "False", False),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "array", "items": TEXT}, '["a"]', ["a"]),
        ({}, "12", 12),
        ({}, "True", "True"),
        ({"$ref": "#/$defs/loop"}, "12", 12),
        ({"$ref": "#text"}, "12", 12),
    ],
)
def test_values_of_xml_calls_have_the_types_that_the_tool_allows(schema: object, written: str, value: object) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 2}
    definitions = {"text": TEXT, "nullable": {"anyOf": [TEXT, {"type": "null"}]}, "loop": loop}
    for parameters in (
        {"type": "object", "properties": {"a": schema}, "$defs": definitions},
        {"type": "object", "additionalProperties": schema, "$defs": definitions},
        {"$ref": "#/$defs/all", "$defs": {**definitions, "all": {"properties": {"a": schema}}}},
    ):
        types = parameter_types([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        parser = AnswerParser(AnswerSyntax(QWEN_CODER), types)
        parts = parser.push(f"<tool_call><function=f><parameter=a>\n{written}\n</parameter></function></tool_call>")
        assert json.loads(joined(parts).calls[0].arguments) == {"a": value}


HOSTILE_SCHEMAS: dict[str, dict[str, Any]] = {
    "values": {"anyOf": [{"$ref": "#/$defs/e"}] * 99, "$defs": {"e": {"enum": [f"v{n}" for n in range(100_000)]}}},
    "steps": {"anyOf": [{"$ref": "#/" + "a/" * 500_000 + str(n)} for n in range(20)]},
    "circles": {"$ref": "#/properties/x", "properties": {"x": {"allOf": [{"$ref": "#/properties/x"}] * 5000}}},
}


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_work_on_the_types_of_a_parameter_is_bounded(name: str) -> None:
    schema = HOSTILE_SCHEMAS[name]
    parameters = {**schema, "properties": {"x": schema, **schema.get("properties", {})}}
    with short_step():
        allowed_types(parameters, "x")


def test_xml_arguments_are_shown_as_each_ends() -> None:
    parser = AnswerParser(AnswerSyntax(QWEN_CODER), TYPES)
    begin, opened = parser.push("<tool_call><function=weather><parameter=city>K")
    assert isinstance(begin, CallBegin) and opened == CallArguments(0, "{")
    assert parser.push("öln</parameter><para") == [CallArguments(0, '"city": "Köln"')]
    assert parser.push("meter=days>2</parameter>") == [CallArguments(0, ', "days": 2')]
    assert parser.push("</function></tool_call>") == [CallArguments(0, "}")]


def test_ids_of_mistrals_calls_are_as_its_templates_demand() -> None:
    [call] = parsed(AnswerSyntax(MISTRAL), ["[TOOL_CALLS]time[ARGS]{}"]).calls
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", call.id)


def test_calls_within_calls_are_not_searched_again() -> None:
    """A search from each of them took seconds."""
    for syntax, text in (
        (HERMES, "<tool_call>{" * 4000),
        (HERMES, "<tool_call>{" * 4000 + "}" * 4000),
        (MISTRAL, '[TOOL_CALLS][{"name": "b"}, {' * 4000),
        (MISTRAL, '[TOOL_CALLS][{"name": "b"}, {' * 4000 + "}" * 4000),
        (LLAMA, '<|python_tag|>{"name": "b"}; {' * 4000 + "}" * 4000),
        (QWEN_CODER, "<tool_call><function=weather><parameter=a>" * 4000),
        (QWEN_CODER, "<tool_call><function=b><parameter=a>" * 4000),
    ):
        began_s = time.process_time()
        whole = divided(AnswerSyntax(syntax), [text])
        assert time.process_time() - began_s < 1.0
        assert divided(AnswerSyntax(syntax), [text[:100], text[100:]]) == whole

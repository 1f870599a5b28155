"""Grammars of answers, asked byte by byte with special tokens as tokens of their own."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replaced
from tokenizers.decoders import ByteFallback

from torchrelay.common.tokens.grammar import Grammar, GrammarCompiler, GrammarState, grammar_error
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat, choice_rule, json_rule, regex_rule
from torchrelay.gateway.inference.answers.answer_parser import AnswerParser
from torchrelay.gateway.inference.answers.grammars import UnsupportedFormat, grammar_source
from torchrelay.gateway.inference.answers.parts import joined, parameter_types
from torchrelay.gateway.inference.answers.schemas import schema_fault
from torchrelay.gateway.inference.answers.syntax import (
    COMMAND,
    HERMES,
    LLAMA,
    MISTRAL,
    NEMOTRON,
    PHI,
    PLAIN,
    QWEN_CODER,
    AnswerSyntax,
    CallSyntax,
)
from torchrelay.gateway.inference.text.processes.answer_syntax import declared_syntax

_SPECIAL = {"[TOOL_CALLS]": 256, "[ARGS]": 257, "<|python_tag|>": 258, "</think>": 259}
_COMPILER = GrammarCompiler(
    TokenDecoder(
        [*((f"<0x{byte:02X}>", byte) for byte in range(256)), *_SPECIAL.items()], {}, set(_SPECIAL), ByteFallback()
    )
)


def _tool(name: str, parameters: dict[str, Any] | None = None, strict: bool = False) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "strict": strict}
    return {"type": "function", "function": function | ({"parameters": parameters} if parameters else {})}


_NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
_TOOLS = [_tool("f", _NUMBER), _tool("g-2")]


def _tokens(text: str) -> list[int]:
    tokens: list[int] = []
    while text:
        marker = next((marker for marker in _SPECIAL if text.startswith(marker)), None)
        tokens += text[0].encode() if marker is None else [_SPECIAL[marker]]
        text = text[1 if marker is None else len(marker) :]
    return tokens


def _verdict(source: str, text: str) -> str:
    """ "ends": nothing may follow; "may end"; "goes on": it is a beginning; "refused"."""
    assert grammar_error(source) == ""
    grammar = _COMPILER.compile(source)
    state = grammar.start(_tokens(text))
    if state.error:
        return "refused"
    if state.is_complete:
        return "ends"
    return "may end" if _may_end(grammar, state) else "goes on"


def _may_end(grammar: Grammar, state: GrammarState) -> bool:
    return bool(state.allowed()[grammar.end_id // 8] >> grammar.end_id % 8 & 1)


def _source(format_: AnswerFormat, tools: list[dict[str, Any]] | None = None, syntax: AnswerSyntax = PLAIN) -> str:
    return grammar_source(format_, tools or [], syntax, _SPECIAL.get)


@pytest.mark.parametrize(
    ("rule", "text", "verdict"),
    [
        (json_rule({"type": "object"}), '{"a": [1, null]}', "ends"),
        (json_rule({"type": "object"}), "[]", "refused"),
        (json_rule({"type": "object"}), '{"a":' + " " * 2, "refused"),  # no endless space
        (json_rule(_NUMBER), '{\n    "x": -12\n}', "ends"),
        (json_rule(_NUMBER), '{"x": 1.5', "refused"),
        (json_rule(True), "null", "ends"),
        (regex_rule(r"a/b\/\d+"), "a/b/12", "may end"),
        (regex_rule("a\nb"), "a\nb", "ends"),
        (regex_rule("[/]"), "/", "ends"),
        (choice_rule(["yes", 'no "\\ \n🔥', "yes!"]), 'no "\\ \n🔥', "ends"),
        (choice_rule(["yes", "yes!"]), "yes", "may end"),
        (choice_rule(["yes", "yes!"]), "nay", "refused"),
    ],
)
def test_text_follows_rule(rule: str, text: str, verdict: str) -> None:
    assert _verdict(_source(AnswerFormat(content=rule)), text) == verdict


def test_without_format_any_text_will_do() -> None:
    assert _source(AnswerFormat()) == _source(AnswerFormat(), _TOOLS, AnswerSyntax(HERMES)) == ""


_CALLS = {
    HERMES: '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    LLAMA: '{{"name": "{name}", "parameters": {arguments}}}',
    MISTRAL: "[TOOL_CALLS]{name}[ARGS]{arguments}",
}


@pytest.mark.parametrize("calls", _CALLS, ids=lambda calls: calls.style)
def test_calls(calls: Any) -> None:
    syntax, pattern = AnswerSyntax(calls), _CALLS[calls]
    f, g = pattern.format(name="f", arguments='{"x": 3}'), pattern.format(name="g-2", arguments='{"y": {}}')
    two = f + {"llama": "; ", "json": "\n", "mistral": ""}[calls.style] + g
    wrong, unknown = pattern.format(name="f", arguments='{"y": 3}'), pattern.format(name="h", arguments="{}")

    required = _source(AnswerFormat(needs_call=True), _TOOLS, syntax)
    assert {_verdict(required, text) for text in (f, g, two)} == {"may end"}
    assert {_verdict(required, text) for text in ("hello", wrong, unknown)} == {"refused"}

    named = _source(AnswerFormat(needs_call=True, tool="g-2", allows_several_calls=False), _TOOLS, syntax)
    assert (_verdict(named, g), _verdict(named, f), _verdict(named, g + two[len(f) :])) == (
        "ends",
        "refused",
        "refused",
    )

    strict = [_tool("f", _NUMBER, strict=True), _TOOLS[1]]
    free = _source(AnswerFormat(), strict, syntax)
    assert {_verdict(free, text) for text in ("hello", "", two)} == {"may end"}
    assert {_verdict(free, text) for text in (wrong, unknown)} == {"refused"}
    if calls.style != "llama":
        assert _verdict(free, f"I call {two} now") == "may end"
        assert _verdict(free, f"I call {wrong}") == _verdict(free, f"{f} and {wrong}") == "refused"

    single = _source(AnswerFormat(allows_several_calls=False), _TOOLS, syntax)
    assert (_verdict(single, "hello"), _verdict(single, two)) == ("may end", "refused")

    if calls.style == "llama":
        for space in (" ", "\n", "\t \r", "\f\v", "\x1c", "\u00a0", "\u3000"):  # the parser skips it before a call
            assert _verdict(free, f"{space}{wrong}") == _verdict(single, f"{space}{two}") == "refused"
            assert _verdict(free, f"{space}hello") == _verdict(free, space) == "may end"
        with pytest.raises(UnsupportedFormat, match="tool_choice"):
            _source(AnswerFormat(content=json_rule(_NUMBER)), _TOOLS, syntax)
        return
    content = _source(AnswerFormat(content=json_rule(_NUMBER)), _TOOLS, syntax)
    assert (_verdict(content, '{"x": 1}'), _verdict(content, f)) == ("ends", "may end")
    assert _verdict(content, "hello") == "refused"


_LISTS = {
    PHI: '<|tool_call|>[{"name": "f", "arguments": %s}, {"name": "f", "arguments": %s}]<|/tool_call|>',
    NEMOTRON: '<TOOLCALL>[{"name": "f", "arguments": %s},\n{"name": "f", "arguments": %s}]</TOOLCALL>',
    COMMAND: '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": %s},'
    '\n    {"tool_call_id": "1", "tool_name": "f", "parameters": %s}\n]<|END_ACTION|>',
}


@pytest.mark.parametrize("calls", _LISTS, ids=lambda calls: calls.opening)
def test_lists_of_calls(calls: CallSyntax) -> None:
    right, wrong = (_LISTS[calls] % ('{"x": 1}', last) for last in ('{"x": 2}', '{"x": ""}'))
    tools = [_tool("f", _NUMBER, strict=True)]
    for needs_call in (True, False):
        source = _source(AnswerFormat(needs_call=needs_call), tools, AnswerSyntax(calls))
        assert (_verdict(source, right), _verdict(source, wrong)) == ("may end", "refused")
        single = _source(AnswerFormat(needs_call=needs_call, allows_several_calls=False), tools, AnswerSyntax(calls))
        assert _verdict(single, right) == "refused"


def test_a_marker_of_calls_within_reasoning_forces_no_call() -> None:
    for tools in ([_tool("f", _NUMBER, strict=True)], _TOOLS):
        syntax = AnswerSyntax(HERMES, ("<thought>", "</thought>"))
        source = _source(AnswerFormat(allows_several_calls=False), tools, syntax)
        thoughts = "\n<thought>I use <tool_call> and {"
        assert _verdict(source, thoughts) == "goes on"
        assert _verdict(source, f"{thoughts}</thought>\n\nHello <thought>") == "may end"
        call = _CALLS[HERMES].format(name="f", arguments='{"x": 3}')
        assert _verdict(source, f"{thoughts}</thought>\n\n{call}") == "ends"
        assert _verdict(source, f"{thoughts}</thought>\n\n<tool_call>a") == "refused"


def test_mistral_without_argument_marker_writes_lists() -> None:
    def special(text: str) -> int | None:
        return _SPECIAL[text] if text == "[TOOL_CALLS]" else None

    source = grammar_source(AnswerFormat(needs_call=True), _TOOLS, AnswerSyntax(MISTRAL), special)
    call = '{"name": "f", "arguments": {"x": 3}}'
    assert _verdict(source, f"[TOOL_CALLS] [{call}, {call}]") == "ends"
    assert _verdict(source, f"[TOOL_CALLS] {call}") == "refused"


def test_schemas_of_tools_keep_their_definitions_and_unknown_keywords_bind_only_strict_tools() -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/x"}},
        "required": ["x"],
        "$defs": {"x": {"enum": ["a"]}},
    }
    unknown = {"type": "object", "dependentRequired": {"x": ["y"]}}
    tools = [_tool("f", parameters), _tool("g", unknown)]
    source = _source(AnswerFormat(needs_call=True), tools, AnswerSyntax(HERMES))
    call = _CALLS[HERMES]
    assert _verdict(source, call.format(name="f", arguments='{"x": "a"}')) == "may end"
    assert _verdict(source, call.format(name="f", arguments='{"x": "b"}')) == "refused"
    strict = grammar_source(AnswerFormat(), [_tool("g", unknown, strict=True)], AnswerSyntax(HERMES), _SPECIAL.get)
    assert "dependentRequired" in grammar_error(strict)


def test_annotations_bind_nothing() -> None:
    notes: list[dict[str, Any]] = [
        {"format": name} for name in ("password", "path", "url", "base64", "regex", "binary")
    ]
    notes += [{"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"unevaluatedProperties": True}]
    for note in notes:
        for schema in (
            {"type": "string", **note},
            {"anyOf": [{"type": "string", **note}]},
            {"$ref": "#/$defs/format", "$defs": {"format": {"type": "string", **note}}},
        ):
            assert _verdict(_source(AnswerFormat(content=json_rule(schema))), '"a"') == "ends"
        tool = _tool("f", {"type": "object", "properties": {"format": {"type": "string", **note}}}, strict=True)
        assert grammar_error(_source(AnswerFormat(), [tool], AnswerSyntax(HERMES))) == ""
    bound = {"type": "string", "format": "date"}
    assert _verdict(_source(AnswerFormat(content=json_rule(bound))), '"2026-01-01"') == "ends"
    assert _verdict(_source(AnswerFormat(content=json_rule(bound))), '"today') == "refused"
    values = {"enum": [{"format": "path"}], "default": {"format": "path"}}
    assert _verdict(_source(AnswerFormat(content=json_rule(values))), '{"format": "path"}') == "ends"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"uniqueItems": True}, "the schema has uniqueItems, which no grammar can hold"),
        ({"type": "object", "not": {}, "if": {}}, "the schema has if, not, which no grammar can hold"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "a oneOf whose alternatives may overlap"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex parse error: look-around"),
        ({"type": "tuple"}, "Invalid type: tuple"),
    ],
)
def test_refusals_name_the_keyword(schema: dict[str, Any], said: str) -> None:
    fault = schema_fault(grammar_error(_source(AnswerFormat(content=json_rule(schema)))))
    assert said in fault
    assert "at 1(" not in fault and "compile" not in fault and "coerce" not in fault


@pytest.mark.parametrize("begins_thinking", [False, True])
@pytest.mark.parametrize(
    "closing", ["</think>", "</thought>", "\n</thought>", "◁/think▷", "|/[{(.-\\~", "[/THINK 09_d]"]
)
def test_reasoning_precedes_the_format(closing: str, begins_thinking: bool) -> None:
    """The closing marker is a special token, or text."""
    syntax = AnswerSyntax(None, ("<think>", closing), begins_thinking)
    source = _source(AnswerFormat(content=json_rule(_NUMBER)), [], syntax)
    opening, answer = "" if begins_thinking else "<think>", '{"x": 1}'
    assert _verdict(source, f"{opening}\nSo 3 < 4.{closing}\n\n{answer}") == "ends"
    assert _verdict(source, f"{opening}So") == "goes on"
    assert _verdict(source, f"{opening}So{closing}\n\nyes") == "refused"
    assert _verdict(source, answer) == ("goes on" if begins_thinking else "ends")
    named = replaced(syntax, calls=HERMES)
    call = _CALLS[HERMES].format(name="f", arguments='{"x": 3}')
    required = _source(AnswerFormat(needs_call=True), _TOOLS, named)
    assert _verdict(required, f"{opening}So{closing}\n{call}") == "may end"


def test_calls_as_xml_take_no_format() -> None:
    with pytest.raises(UnsupportedFormat):
        _source(AnswerFormat(needs_call=True), _TOOLS, AnswerSyntax(QWEN_CODER))


def test_own_grammar_is_used_as_it_is_and_cannot_change_options() -> None:
    source = 'start: "a" | "b"'
    assert _source(AnswerFormat(grammar=source)) == source
    assert "%llguidance" in grammar_error(f"%llguidance {json.dumps({'no_forcing': False})}\n{source}")


_THOUGHTS = ("<think>", "</think>")  # its end is a special token here
_DECLARED = {
    "reasoning": {"open": "<why>\n", "close": "\n</why>", "content": "text"},
    "tool_calls": {
        "open": "\n<do>\n",
        "close": "\n</do>\n",
        "content": "json",
        "transform": {"function": {"name": "{content.tool}", "arguments": "{content.with}"}},
    },
}
_SYNTAXES = [
    declared_syntax({"fields": _DECLARED}),
    *(
        AnswerSyntax(calls, thoughts, begins_thinking)
        for calls in (HERMES, PHI, COMMAND, MISTRAL, LLAMA)
        for thoughts, begins_thinking in ((None, False), (_THOUGHTS, False), (("<why>", "</why>"), False))
    ),
    AnswerSyntax(HERMES, _THOUGHTS, True),
    AnswerSyntax(LLAMA, ("<why>", "</why>"), True),
]
_FORMATS = [
    AnswerFormat(),
    AnswerFormat(allows_several_calls=False),
    AnswerFormat(needs_call=True),
    AnswerFormat(needs_call=True, tool="f", allows_several_calls=False),
    AnswerFormat(content=json_rule(_NUMBER)),
    AnswerFormat(content=json_rule({"type": "string"})),
    AnswerFormat(content=regex_rule("[^q]{0,90}")),
]
_STRICT = [_tool("f", _NUMBER, strict=True), _tool("g-2", _NUMBER)]


def _fragments(syntax: AnswerSyntax) -> list[list[int]]:
    """Parts of answers of the syntax, whose special tokens are such, or their spellings."""
    calls = syntax.calls
    assert calls is not None
    key = calls.arguments_keys[-1 if calls.style == "llama" else 0]
    names = ("f", "g-2", "h")
    heads = [f'{{"{calls.name_key}": "{name}", "{key}": ' for name in names]
    texts = [*heads, *names, '{"x": 1}', '{"x": "a"}', *'{}[];q"', ", ", " ", "\n", "\u00a0", "a", "[ARGS]"]
    texts += [calls.opening, calls.closing, *(syntax.thoughts or ())] * 3
    whole = [f'{head}{{"x": {value}}}}}' for head in heads for value in ("2", '"b"')]
    whole += ['f[ARGS]{"x": 3}', 'f[ARGS]{"x": []}']
    texts += [f"{opening}{call}{calls.closing}" for call in whole for opening in (calls.opening, "", "; ")]
    tokens = [encoded(text) for text in texts if text for encoded in (_tokens, lambda text: list(text.encode()))]
    return [list(fragment) for fragment in dict.fromkeys(map(tuple, tokens))]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(_SYNTAXES), st.sampled_from(_FORMATS), st.data())
def test_what_a_grammar_accepts_follows_the_schemas_once_it_is_parsed(
    syntax: AnswerSyntax, format_: AnswerFormat, data: st.DataObject
) -> None:
    try:
        grammar = _COMPILER.compile(_source(format_, _STRICT, syntax))
    except UnsupportedFormat:
        return
    tokens: list[int] = []
    fragments = _fragments(syntax)
    drawn = data.draw(st.lists(st.sampled_from(fragments), max_size=25))
    for number, fragment in enumerate(drawn + fragments):
        state = grammar.start(tokens)
        if state.is_complete or (number >= len(drawn) and _may_end(grammar, state)):
            break
        if not grammar.start(tokens + fragment).error:
            tokens += fragment
    else:
        return
    names = {number: marker.encode() for marker, number in _SPECIAL.items()}
    text = b"".join(names.get(token) or bytes([token]) for token in tokens).decode()
    parser = AnswerParser(replaced(syntax, calls_alone=bool(format_.content)), parameter_types(_STRICT))
    answer = joined(parser.push(text) + parser.flush())
    for call in answer.calls:
        assert call.name in ("f", "g-2") and format_.tool in ("", call.name)
        jsonschema.validate(json.loads(call.arguments), _NUMBER)
    assert len(answer.calls) <= 1 or format_.allows_several_calls
    assert answer.calls or not format_.needs_call
    if format_.content.startswith("%json"):
        schema = json.loads(format_.content.removeprefix("%json "))
        assert answer.calls or jsonschema.validate(json.loads(answer.content), schema) is None
    elif format_.content:
        assert "q" not in answer.content

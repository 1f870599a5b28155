"""The syntax of answers, from a model's template and its tokenizer's response template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchrelay.gateway.inference.answers.syntax import (
    COMMAND,
    HERMES,
    LLAMA,
    MISTRAL,
    NEMOTRON,
    PHI,
    PLAIN,
    QWEN_CODER,
    SEED,
    AnswerSyntax,
    CallSyntax,
)
from torchrelay.gateway.inference.text.processes.answer_syntax import declared_syntax, merged, syntax_of
from torchrelay.gateway.inference.text.processes.chat_format import tokenizer_config

THINKS = ("<think>", "</think>")
THINKS_COMMAND = ("<|START_THINKING|>", "<|END_THINKING|>")


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{{ messages }}", PLAIN),
        ("<tool_call>{{ tool | tojson }}</tool_call>", AnswerSyntax(HERMES)),
        ("<tool_call>\n<function=example>\n<parameter=a>", AnswerSyntax(QWEN_CODER)),
        ("<function=example>{json}</function>", PLAIN),
        (
            "{% set t = '<seed:tool_call>' %}\n<function=a>{% set e = '</seed:think>' %}",
            AnswerSyntax(SEED, ("<seed:think>", "</seed:think>")),
        ),
        ("{{ '[TOOL_CALLS]' }}", AnswerSyntax(MISTRAL)),
        ("{{ '<|tool_call|>' }}", AnswerSyntax(PHI)),
        ("<TOOLCALL>[", AnswerSyntax(NEMOTRON)),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>", AnswerSyntax(COMMAND, THINKS_COMMAND)),
        ("<tool_call>{name}\n<arg_key>", PLAIN),
        ("{{ '<|python_tag|>' }}", AnswerSyntax(LLAMA)),
        ('Respond in the format {"name": function name, "parameters": dictionary}', AnswerSyntax(LLAMA)),
        ("{{ content.split('</think>')[-1] }}<tool_call>", AnswerSyntax(HERMES, THINKS)),
        ("[THINK]{{ thoughts }}[/THINK]", AnswerSyntax(thoughts=("[THINK]", "[/THINK]"))),
    ],
)
def test_template_shows_the_syntax(template: str, syntax: AnswerSyntax) -> None:
    assert syntax_of(template) == syntax


CALLS: dict[str, Any] = {
    "open": "<|ACTION|>",
    "close": "<|END|>",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{parameters}"}},
}


@pytest.mark.parametrize(
    ("fields", "syntax"),
    [
        (
            {"tool_calls": CALLS, "thinking": {"open": "<t>", "close": "</t>"}, "content": {"close": "<|end|>"}},
            AnswerSyntax(CallSyntax("json", "<|ACTION|>", "<|END|>", "tool", ("parameters",)), ("<t>", "</t>")),
        ),
        (
            {"tool_calls": {"open": "<c>", "content": "json", "transform": {"function": "{content}"}}},
            AnswerSyntax(CallSyntax("json", "<c>", "", "name", ("arguments",))),
        ),
        ({"reasoning_content": {"open": "<t>", "close": "</t>"}}, AnswerSyntax(thoughts=("<t>", "</t>"))),
        ({"thinking": {"open": "<t>"}}, PLAIN),
        ({"tool_calls": {**CALLS, "open": ["<a>", "<b>"]}}, PLAIN),
        ({"tool_calls": {**CALLS, "close_pattern": "x+"}}, PLAIN),
        ({"tool_calls": {**CALLS, "content": "xml-inline"}}, PLAIN),
        ({"tool_calls": {**CALLS, "content_args": {"unquoted_keys": True}}}, PLAIN),
        ({"tool_calls": {**CALLS, "transform": {"function": {"name": "f", "arguments": "{a}"}}}}, PLAIN),
        ({"tool_calls": 1}, PLAIN),
        ([], PLAIN),
    ],
)
def test_response_template_declares_the_syntax(fields: Any, syntax: AnswerSyntax) -> None:
    assert declared_syntax({"fields": fields}) == syntax
    config = json.dumps({"chat_template": "x", "response_template": {"fields": fields}}).encode()
    assert tokenizer_config(config).declared_syntax == syntax


@pytest.mark.parametrize("template", [None, "x", [1], {}])
def test_other_values_declare_nothing(template: Any) -> None:
    assert declared_syntax(template) == PLAIN


def test_declaration_completes_the_template() -> None:
    declared = AnswerSyntax(CallSyntax("json", "<c>"), ("<t>", "</t>"))
    assert merged(AnswerSyntax(HERMES), declared) == AnswerSyntax(HERMES, ("<t>", "</t>"))
    assert merged(AnswerSyntax(thoughts=THINKS), declared) == AnswerSyntax(declared.calls, THINKS)

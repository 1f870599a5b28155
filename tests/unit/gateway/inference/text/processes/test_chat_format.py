"""Chat formats from a model's files."""

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
from torchrelay.gateway.inference.text.processes.chat_format import MAX_TEMPLATE_CHARS, template_file, tokenizer_config
from torchrelay.gateway.inference.text.processes.chat_template import ChatTemplate


def encoded(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def rendered(config: bytes) -> str | None:
    template = tokenizer_config(config).template
    return None if template is None else template.render({}, 100)


def test_special_tokens_and_named_templates_are_read() -> None:
    config = encoded(bos_token="<s>", eos_token={"content": "</s>", "lstrip": False}, pad_token=None, chat_template="x")
    assert tokenizer_config(config).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert rendered(config) == "x"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(encoded(chat_template=named)) == "d"
    assert rendered(encoded(chat_template=named[:1])) is None
    assert rendered(encoded()) is None


@pytest.mark.parametrize("config", [b"[]", b"{", b'"x"', b"\xff", b"[" * 100_000])
def test_invalid_config_files_are_refused(config: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        tokenizer_config(config)


def test_overlong_template_is_refused() -> None:
    for parse in (template_file, lambda template: tokenizer_config(encoded(chat_template=template.decode()))):
        with pytest.raises(ValueError, match="longer than"):
            parse(b"x" * (MAX_TEMPLATE_CHARS + 1))
    assert template_file(b"x" * 10).render({}, 10) == "x" * 10


LOOP = "{% for p in {} %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
SYSTEM = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def text_of(source: str, messages: list[dict[str, str]]) -> str:
    return ChatTemplate(source).rendered(messages, {}, 1000, continues_last=False)


def test_template_gets_parts_or_strings_as_it_takes_them() -> None:
    for source in (
        # They loop over parts.
        "{% for m in messages %}" + LOOP.replace("{}", "m.content") + "{% endfor %}",
        "{% for m in messages %}" + LOOP.replace("{}", "m['content']") + "{% endfor %}",
        "{% for m in messages %}" + LOOP.replace("{}", "m['content'] | list") + "{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}" + LOOP.replace("{}", "c") + "{% endfor %}",
        # They take strings.
        "{% for m in messages %}<{{ m.content }}>{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}"
        + LOOP.replace("{}", "m.content")
        + "{% endif %}{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}{% if c is not string %}"
        + LOOP.replace("{}", "c")
        + "{% else %}<{{ c }}>{% endif %}{% endfor %}",
    ):
        assert text_of(source, SYSTEM) == "<Be brief.><Hi>"


def test_developer_is_system_where_the_template_knows_only_system() -> None:
    only_system = "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
    assert text_of(only_system, SYSTEM) == "[Be brief.]"
    knows_both = "{% for m in messages %}{{ m.role }} {% endfor %}{# system and developer #}"
    assert text_of(knows_both, SYSTEM) == "developer user "
    assert SYSTEM[0]["role"] == "developer", "the request's own messages stay"


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


DECLARED_CALLS: dict[str, Any] = {
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
            {
                "tool_calls": DECLARED_CALLS,
                "thinking": {"open": "<t>", "close": "</t>"},
                "content": {"close": "<|end|>"},
            },
            AnswerSyntax(CallSyntax("json", "<|ACTION|>", "<|END|>", "tool", ("parameters",)), ("<t>", "</t>")),
        ),
        (
            {"tool_calls": {"open": "<c>", "content": "json", "transform": {"function": "{content}"}}},
            AnswerSyntax(CallSyntax("json", "<c>", "", "name", ("arguments",))),
        ),
        ({"reasoning_content": {"open": "<t>", "close": "</t>"}}, AnswerSyntax(thoughts=("<t>", "</t>"))),
        ({"thinking": {"open": "<t>"}}, PLAIN),
        ({"tool_calls": {**DECLARED_CALLS, "open": ["<a>", "<b>"]}}, PLAIN),
        ({"tool_calls": {**DECLARED_CALLS, "close_pattern": "x+"}}, PLAIN),
        ({"tool_calls": {**DECLARED_CALLS, "content": "xml-inline"}}, PLAIN),
        ({"tool_calls": {**DECLARED_CALLS, "content_args": {"unquoted_keys": True}}}, PLAIN),
        ({"tool_calls": {**DECLARED_CALLS, "transform": {"function": {"name": "f", "arguments": "{a}"}}}}, PLAIN),
        ({"tool_calls": {**DECLARED_CALLS, "close": "x" * 65}}, PLAIN),  # sought at each character of an answer
        ({"tool_calls": {**DECLARED_CALLS, "open": "x" * 65}}, PLAIN),
        (
            {
                "tool_calls": {
                    **DECLARED_CALLS,
                    "transform": {"function": {"name": f"{{{'a' * 65}}}", "arguments": "{b}"}},
                }
            },
            PLAIN,
        ),
        ({"thinking": {"open": "<t>", "close": "x" * 65}}, PLAIN),
        ({"tool_calls": 1}, PLAIN),
        ([], PLAIN),
    ],
)
def test_response_template_declares_the_syntax(fields: Any, syntax: AnswerSyntax) -> None:
    assert declared_syntax({"fields": fields}) == syntax
    config = json.dumps({"chat_template": "x", "response_template": {"fields": fields}}).encode()
    assert tokenizer_config(config).declared_syntax == syntax


def test_declaration_completes_the_template() -> None:
    others: list[Any] = [None, "x", [1], {}]
    assert [declared_syntax(other) for other in others] == [PLAIN] * 4
    declared = AnswerSyntax(CallSyntax("json", "<c>"), ("<t>", "</t>"))
    assert merged(AnswerSyntax(HERMES), declared) == AnswerSyntax(HERMES, ("<t>", "</t>"))
    assert merged(AnswerSyntax(thoughts=THINKS), declared) == AnswerSyntax(declared.calls, THINKS)

"""Chat templates: Jinja2 in its sandbox, in the environment of transformers without the helpers for training.

Templates are untrusted code. Only text processes import this module; the gateway does not even load Jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.utils
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchrelay.common.chat_syntax import template_environment
from torchrelay.gateway.inference.answers.syntax import AnswerSyntax
from torchrelay.gateway.inference.text.processes.answer_syntax import syntax_of

# Of the end of a content: what the template writes behind it may contain the content, too.
_MARK = "\ue000"


def raise_exception(message: object) -> NoReturn:
    """Rejects messages; templates call it."""
    raise jinja2.TemplateError(str(message))


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja2's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


class PlainDict:
    """``dict`` without access to the class itself."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PlainNamespace(jinja2.utils.Namespace):
    """A namespace without underscored names, which would give access to CPython internals."""

    def __init__(*args: Any, **fields: Any) -> None:  # no self: namespace(self=...) works, as in Jinja2
        attributes = dict(*args[1:], **fields)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attributes must not start with an underscore: {name!r}")


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = template_environment()
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = PlainDict()
    environment.globals["namespace"] = PlainNamespace
    return environment


_ENVIRONMENT = _make_environment()


def _is_content(node: nodes.Node, names: Container[str] = ()) -> bool:
    """Whether an expression is the content of a message, or one of the variables ``names``."""
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case nodes.Filter(node=nodes.Expr() as inner):
            return _is_content(inner, names)
    return False


def _with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with objects for all arguments of calls, of which a template may take no other; empty if there are
    no others.
    """
    changed, has_texts = [dict(message) for message in messages], False
    for message in changed:
        message["tool_calls"] = calls = [dict(call) for call in message.get("tool_calls", ())]
        for call in calls:
            if not isinstance(arguments := call["function"]["arguments"], dict):
                call["function"] = {**call["function"], "arguments": {"arguments": arguments}}
                has_texts = True
        if not calls:
            del message["tool_calls"]
    return changed if has_texts else []


def _until_mark(content: str, text: str) -> str:
    """``text`` until the mark behind the last message's ``content``.

    Raises ``TemplateError`` if the content before it is changed.
    """
    shown = text[: max(text.rfind(_MARK), 0)]
    if not shown.endswith(content.lstrip()) or not content.strip():
        raise jinja2.TemplateError("it does not show the last message as it is, so no answer can continue it")
    return shown


class OutputTooLong(Exception):
    """A template wrote more than ``num_chars`` characters, and was stopped."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(f"the output is longer than {num_chars} characters")
        self.num_chars = num_chars


class ChatTemplate:
    """A template, compiled at its first use."""

    def __init__(self, source: str) -> None:
        self._source = source

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _ENVIRONMENT.from_string(self._source)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template loops over the parts of a content, and does not take strings as well."""
        tree = _ENVIRONMENT.parse(self._source)
        names = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
        }
        tests = (test for test in tree.find_all(nodes.Test) if test.name == "string")
        if any(_is_content(test.node, names) for test in tests):
            return False
        return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))

    def takes(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> bool:
        """Whether the template writes tools and tool calls, as far as there are any."""
        has_calls = any("tool_calls" in message for message in messages)
        return (not tools or "tools" in self._source) and (not has_calls or "tool_calls" in self._source)

    @cached_property
    def answer_syntax(self) -> AnswerSyntax:
        """The syntax of answers that the template shows to the model."""
        return syntax_of(self._source)

    def rendered(
        self, given: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], max_chars: int, *, continues_last: bool
    ) -> str:
        """The text of messages, which ends with the last one's content, or else with the head of an answer.

        Raises ``OutputTooLong``, and whatever the template raises.
        """
        variables, content = {**variables, "add_generation_prompt": not continues_last}, ""
        if continues_last:
            content = given[-1]["content"]
            given = [*given[:-1], {**given[-1], "content": content + _MARK}]
        try:
            text = self.render({**variables, "messages": self._adapted(given)}, max_chars)
        except (OutputTooLong, MemoryError, RecursionError):
            raise
        except Exception:
            if not (wrapped := _with_objects(given)):
                raise
            text = self.render({**variables, "messages": self._adapted(wrapped)}, max_chars)
        return _until_mark(content, text) if continues_last else text

    def _adapted(self, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template expects them: contents as lists of parts if it loops over these, and the role
        ``developer``, which succeeded ``system``, under the name that it knows.
        """
        adapted = [dict(message) for message in given]
        for message in adapted:
            if message["role"] == "developer" and "developer" not in self._source:
                message["role"] = "system"
            if isinstance(message.get("content"), str) and self._takes_parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
        return adapted

    def render(self, variables: Mapping[str, Any], max_chars: int) -> str:
        """The text. Raises ``OutputTooLong``, and whatever the template raises."""
        pieces: list[str] = []
        num_chars = 0
        for piece in self._compiled.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                raise OutputTooLong(num_chars)
        return "".join(pieces)

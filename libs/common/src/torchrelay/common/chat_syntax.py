"""The syntax of chat templates: Jinja2's, with loop controls and transformers' ``generation`` block.

Templates are untrusted: they are parsed, as they are rendered, only in processes that can be killed.
"""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class InvalidSyntax(ValueError):
    """A template that cannot be parsed; the message names the line where one is known."""


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; rendered here as its content."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja2 declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """An environment with this syntax, and no functions except Jinja2's own."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )


def check_syntax(source: str) -> None:
    """Parses, runs nothing. Raises ``InvalidSyntax``."""
    try:
        template_environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidSyntax(f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise InvalidSyntax("it is nested too deeply") from None

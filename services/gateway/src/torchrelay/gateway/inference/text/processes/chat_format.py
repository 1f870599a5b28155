"""The chat format in an upload's files: a template and the special tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from torchrelay.gateway.inference.answers.syntax import PLAIN, AnswerSyntax
from torchrelay.gateway.inference.text.processes.answer_syntax import declared_syntax
from torchrelay.gateway.inference.text.processes.chat_template import ChatTemplate

MAX_TEMPLATE_CHARS: Final = 1 << 20
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The rendering of messages; files of templates take precedence over the configuration's own."""

    template: ChatTemplate | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    tool_template: ChatTemplate | None = None  # for requests with tools, if the configuration has another for them
    declared_syntax: AnswerSyntax = PLAIN  # of answers


def template_file(encoded: bytes) -> ChatTemplate:
    """The template of a ``.jinja`` file. Raises ``ValueError``."""
    return _template(encoded.decode())


def tokenizer_config(encoded: bytes) -> ChatFormat:
    """The format of a ``tokenizer_config.json``. Raises ``ValueError``."""
    config = msgspec.json.decode(encoded, type=dict[str, Any])
    sources = _templates_of(config.get("chat_template"))
    default, tool_use = (_template(source) if source else None for source in sources)
    tokens = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    return ChatFormat(default, tokens, tool_use, declared_syntax(config.get("response_template")))


def _template(source: str) -> ChatTemplate:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
    return ChatTemplate(source)


def _templates_of(value: Any) -> tuple[str, str]:
    """The default template, and that for requests with tools; empty if there is none."""
    named: dict[Any, Any] = {"default": value}
    if isinstance(value, list):  # several named templates: [{"name": "default", "template": ...}, ...]
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    default, tool_use = (named.get(name) for name in ("default", "tool_use"))
    return default if isinstance(default, str) else "", tool_use if isinstance(tool_use, str) else ""


def _content(token: Any) -> str:
    content = token.get("content", "") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""

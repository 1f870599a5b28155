"""Messages between the gateway and a text process: msgpack over a Unix socket, each frame after its length.

gateway                              text process
                                     Ready                           its rights are dropped
Forget(files)
Load(file), its bytes                Loaded | Refusal
Prompt                               TokenIds | Refusal
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from torchrelay.gateway.inference.answers.answer_format import AnswerFormat
from torchrelay.gateway.inference.answers.syntax import PLAIN, AnswerSyntax

LENGTH_BYTES: Final = 4  # big endian, before each frame
MAX_ANSWER_BYTES: Final = 64 << 20

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"

RefusalCause: TypeAlias = Literal[
    "file",  # it cannot be read: ``detail``
    "no_template",
    "no_tools",  # the template ignores tools, or their calls
    "tool_calls",  # the template asks for calls in an unknown syntax
    "template",  # it failed: ``detail``
    "characters",  # the text is too long: ``number`` characters
    "tokenizer",  # it cannot encode this text
    "vocabulary",  # the token ``detail`` with id ``number`` is beyond the model's vocabulary
    "tokens",  # the prompt is too long: ``number`` tokens
    "format",  # of the answer; it cannot be followed: ``detail``
]


FileId: TypeAlias = tuple[str, str]  # name and digest


class TextLimits(msgspec.Struct, frozen=True):
    """The limits of a text process. CPU seconds, because the wall clock also runs while other processes compute."""

    prompt_cpu_s: float = 2.0  # for rendering a prompt, and again for encoding it
    load_cpu_s: float = 10.0  # for reading one file
    max_memory_bytes: int = 1 << 30  # of address space


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Frees files that are no longer needed. Not answered."""

    files: tuple[FileId, ...]


class Load(msgspec.Struct, tag=True, frozen=True):
    """The file's ``num_bytes`` follow."""

    file: FileId
    num_bytes: int


class Prompt(msgspec.Struct, tag=True, frozen=True):
    """Messages for the chat template, or a text, to be encoded with these files."""

    files: tuple[FileId, ...]
    vocab_size: int
    max_tokens: int
    max_chars: int
    messages: tuple[dict[str, Any], ...] | None = None
    continues_last: bool = False  # the answer continues the last message
    tools: tuple[dict[str, Any], ...] = ()  # for the chat template
    template_kwargs: dict[str, Any] = {}  # more variables for it
    answer_format: AnswerFormat | None = None
    text: str = ""
    second_text: str | None = None  # of a pair
    adds_special_tokens: bool = False  # those of the tokenizer, such as BOS


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The process takes commands."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The file of the last ``Load`` is in memory."""


class TokenIds(msgspec.Struct, tag=True, frozen=True):
    packed: bytes  # int32, in the machine's byte order
    syntax: AnswerSyntax = PLAIN  # of the answer to messages
    grammar: str = ""  # of the answer; empty: any text
    second_text: int = 0  # where that of a pair begins, by the types of tokens; 0: nowhere


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The upload or the request is at fault."""

    cause: RefusalCause
    detail: str = ""
    number: int = 0


Command: TypeAlias = Forget | Load | Prompt
Answer: TypeAlias = Ready | Loaded | TokenIds | Refusal

_ENCODER: Final = msgspec.msgpack.Encoder()


def frame_of(message: Command | Answer) -> bytes:
    """The message's frame with its length."""
    encoded = _ENCODER.encode(message)
    return len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded

"""Tool calls in the text of an answer.

Hermes models, Qwen's and others write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from torchrelay.common.ids import new_id

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


Part: TypeAlias = str | ToolCall


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_DECODER: msgspec.json.Decoder[_Call] = msgspec.json.Decoder(_Call)


class ToolCallParser:
    """Divides the text of a choice into content and calls, as it arrives.

    Space around calls is no content. A call that is not valid JSON, or does not end, is content.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""  # outside of a call: white space, and what may begin a call
        self._call: list[str] | None = None  # the pieces of a call, from its opening on
        self._tail = ""  # of these, what may begin the closing

    def push(self, text: str) -> Sequence[Part]:
        """The parts that ``text`` completes."""
        parts: list[Part] = []
        while text:
            text = self._content(text, parts) if self._call is None else self._arguments(text, parts)
        return parts

    def flush(self) -> str:
        """The content that was held, once the choice is over."""
        held, self._held = self._held, ""
        if self._call is not None:
            held += "".join(self._call)
            self._call = None
        return "" if self.num_calls and not held.strip() else held

    def _content(self, text: str, parts: list[Part]) -> str:
        """Takes the content up to the next call; returns the rest."""
        text, self._held = self._held + text, ""
        begin = text.find(_OPEN)
        if begin >= 0:
            _add(parts, text[:begin].rstrip())
            self._call, self._tail = [_OPEN], ""
            return text[begin + len(_OPEN) :]
        shown = len(text) - _num_begun(text, _OPEN)
        shown = len(text[:shown].rstrip())
        self._held = text[shown:]
        _add(parts, text[:shown])
        return ""

    def _arguments(self, text: str, parts: list[Part]) -> str:
        """Takes the text of a call up to its end; returns the rest."""
        assert self._call is not None
        searched = self._tail + text
        end = searched.find(_CLOSE)
        if end < 0:
            self._call.append(text)
            self._tail = searched[-len(_CLOSE) + 1 :]
            return ""
        num_taken = end + len(_CLOSE) - len(self._tail)
        written = "".join([*self._call, text[:num_taken]])
        self._call = None
        call = _parsed(written[len(_OPEN) : -len(_CLOSE)])
        if call is None:
            _add(parts, written)
        else:
            self.num_calls += 1
            parts.append(call)
        return text[num_taken:]


def divided(text: str) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a whole answer."""
    parser = ToolCallParser()
    parts = [*parser.push(text), parser.flush()]
    return "".join(part for part in parts if isinstance(part, str)), [p for p in parts if isinstance(p, ToolCall)]


def _add(parts: list[Part], content: str) -> None:
    if content:
        parts.append(content)


def _num_begun(text: str, marker: str) -> int:
    """The length of the longest end of ``text`` that ``marker`` begins with."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-size:])), 0)


def _parsed(written: str) -> ToolCall | None:
    try:
        call = _DECODER.decode(written.strip())
        arguments = bytes(call.arguments).decode()
        if arguments.startswith('"'):  # some models write the object as a string
            arguments = json.loads(arguments)
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    return ToolCall(new_id("call"), call.name, arguments) if is_object else None

"""The parser of answers: reasoning, content and calls of tools."""

from __future__ import annotations

from typing import Final

from torchrelay.gateway.inference.answers.json_calls import JsonCalls, LlamaCalls, MistralCalls
from torchrelay.gateway.inference.answers.parts import ParameterTypes, Part, Reasoning
from torchrelay.gateway.inference.answers.syntax import AnswerSyntax, CallStyle
from torchrelay.gateway.inference.answers.text_reader import Steps, TextReader, num_begun
from torchrelay.gateway.inference.answers.tool_call_parser import ToolCallParser
from torchrelay.gateway.inference.answers.xml_calls import XmlCalls

_PARSERS: Final[dict[CallStyle, type[ToolCallParser]]] = {
    "json": JsonCalls,
    "mistral": MistralCalls,
    "llama": LlamaCalls,
    "xml": XmlCalls,
}


class AnswerParser:
    """Divides the text of a choice into parts, as it arrives, a piece per token.

    ``types``: of the tools that the answer may call; None: none.
    """

    def __init__(self, syntax: AnswerSyntax, types: ParameterTypes | None) -> None:
        self.num_reasoning_tokens = 0  # with the markers
        self._num_undecided = 0  # tokens that may be the opening of the reasoning
        self._reasoning = (
            None if syntax.thoughts is None else _ReasoningParser(*syntax.thoughts, syntax.begins_thinking)
        )
        calls = syntax.calls if types else None
        self._calls = None if calls is None else _PARSERS[calls.style](calls, types or {})
        self._opening = calls.opening if calls is not None and syntax.calls_alone else ""  # that decides what follows
        self._undecided = ""

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[Part]:
        """The parts that the text of a token completes; the text may be empty."""
        parts: list[Part] = []
        if (reasoning := self._reasoning) is not None:
            was_inside = reasoning.is_inside
            text = reasoning.push(text, parts)
            self._num_undecided += 1
            if was_inside or reasoning.is_inside or parts:
                self.num_reasoning_tokens += self._num_undecided
                self._num_undecided = 0
            if reasoning.is_over:
                self._reasoning = None
        return parts + self._divided(text)

    def flush(self) -> list[Part]:
        """The parts that were held, once the choice is over."""
        parts: list[Part] = []
        if self._reasoning is not None:
            parts += self._divided(self._reasoning.flush(parts))
            self._reasoning = None
        if self._undecided:  # too short for an opening
            return [*parts, self._undecided]
        return parts if self._calls is None else parts + self._calls.flush()

    def _divided(self, text: str) -> list[Part]:
        """The parts of text after the reasoning."""
        if self._opening:
            text, self._undecided = self._undecided + text, ""
            begin = text.lstrip()
            if len(begin) < len(self._opening) and self._opening.startswith(begin):
                self._undecided = text
                return []
            if not begin.startswith(self._opening):
                self._calls = None
            self._opening = ""
        if self._calls is not None:
            return self._calls.push(text)
        return [text] if text else []


class _ReasoningParser:
    """Reads the reasoning at the beginning of a text; white space around it belongs to neither part."""

    def __init__(self, opening: str, closing: str, is_inside: bool) -> None:
        self.is_inside = is_inside
        self.is_over = False
        self._opening, self._closing = opening, closing
        self._reader = TextReader()
        self._parts: list[Part] = []
        self._steps = self._read()

    def push(self, text: str, parts: list[Part]) -> str:
        """Adds the parts that ``text`` completes; returns the text after the reasoning."""
        self._reader.text += text
        self._parts = parts
        self.is_over = next(self._steps, self) is self
        return self._reader.take(len(self._reader.text)) if self.is_over else ""

    def flush(self, parts: list[Part]) -> str:
        self._reader.is_over = True
        return self.push("", parts)

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.mark()
        yield from reader.space()
        if not (yield from reader.takes(self._opening)) and not self.is_inside:
            reader.restore()
            return
        reader.unmark()
        self.is_inside = True
        yield from reader.space()
        yield from self._thoughts()
        self.is_inside = False
        yield from reader.space()

    def _thoughts(self) -> Steps[None]:
        reader = self._reader
        while (end := reader.text.find(self._closing)) < 0:
            begun = 0 if reader.is_over else num_begun(reader.text, self._closing)
            self._show(reader.take(len(reader.text[: len(reader.text) - begun].rstrip())))
            if reader.is_over:
                reader.take(len(reader.text))
                return
            yield
        self._show(reader.take(end).rstrip())
        reader.take(len(self._closing))

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

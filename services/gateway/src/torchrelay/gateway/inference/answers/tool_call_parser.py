"""The interface of the parsers of tool calls, and what the syntaxes share."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from string import ascii_letters, digits
from typing import Final

from torchrelay.common.ids import new_id
from torchrelay.gateway.inference.answers.parts import CallArguments, CallBegin, ParameterTypes, Part
from torchrelay.gateway.inference.answers.syntax import CallSyntax
from torchrelay.gateway.inference.answers.text_reader import ObjectScanner, Steps, TextReader, num_begun

_NUM_MISTRAL_ID_CHARS: Final = 9  # its templates take ids of this length alone


class ToolCallParser(ABC):
    """Divides text into content and calls, as it arrives; white space around calls is no content.

    The arguments of a declared tool are shown as they arrive: such a call stays a call, with the arguments as far as
    the model wrote them, even if they break off. The call of a tool that is not declared is shown once it is whole.
    Any other text is content.
    """

    def __init__(self, syntax: CallSyntax, types: ParameterTypes) -> None:
        self.num_calls = 0
        self._syntax = syntax
        self._types = types
        self._reader = TextReader()
        self._parts: list[Part] = []
        self._steps = self._read()

    def push(self, text: str) -> list[Part]:
        """The parts that ``text`` completes."""
        if not text:
            return []
        self._reader.text += text
        return self._advanced()

    def flush(self) -> list[Part]:
        """The parts that were held, once the text is over."""
        self._reader.is_over = True
        return self._advanced()

    def _advanced(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads the whole text."""

    # -- steps of all syntaxes -------------------------------------------------------------------------------------

    def _content_until(self, opening: str) -> Steps[str | None]:
        """Shows the content before the next opening and takes both; returns the white space before the opening, or
        None at the end of the text.
        """
        reader = self._reader
        while True:
            text = reader.text
            begin = text.find(opening)
            if begin >= 0:
                shown = text[:begin].rstrip()
                self._show(reader.take(len(shown)))
                gap = reader.take(begin - len(shown))
                reader.take(len(opening))
                return gap
            if reader.is_over:
                self._show_last(reader.take(len(text)))
                return None
            shown = text[: len(text) - num_begun(text, opening)].rstrip()
            self._show(reader.take(len(shown)))
            yield

    def _close(self) -> Steps[None]:
        """Takes the closing after a call, if it follows, or as far as the text has it."""
        reader, closing = self._reader, self._syntax.closing
        reader.mark()
        yield from reader.space()
        if closing and (yield from reader.takes(closing)):
            reader.unmark()
        elif reader.text and reader.is_over and closing.startswith(reader.text):
            reader.take(len(reader.text))
        else:
            reader.restore()

    def _show(self, content: str) -> None:
        if content:
            self._parts.append(content)

    def _show_last(self, content: str) -> None:
        self._show("" if self.num_calls and not content.strip() else content)

    def _refuse(self, before: str) -> None:
        """Shows what was taken since the mark as content, after ``before``; and the rest, if the text is over.

        Nothing is searched again for calls: that would take the square of the time for calls within calls.
        """
        reader = self._reader
        taken = before + reader.unmark()
        if reader.is_over:
            self._show_last(taken + reader.take(len(reader.text)))
            return
        shown = taken.rstrip()
        self._show(shown)
        reader.text = taken[len(shown) :] + reader.text

    def _begin(self, name: str) -> None:
        is_mistral = self._syntax.style == "mistral"
        call_id = _mistral_id() if is_mistral else new_id("call")
        self._parts.append(CallBegin(self.num_calls, call_id, name))
        self.num_calls += 1

    def _argue(self, arguments: str) -> None:
        """Shows a piece of the arguments of the last call."""
        if arguments:
            self._parts.append(CallArguments(self.num_calls - 1, arguments))

    def _arguments(self, name: str) -> Steps[bool]:
        """Reads the object of arguments that the text begins with; whether it is a call."""
        if name in self._types:
            yield from self._live_arguments(name)
            return True
        written = yield from self._whole_object()
        if written is None or not is_object(written):
            return False
        self._begin(name)
        self._argue(written)
        return True

    def _live_arguments(self, name: str) -> Steps[None]:
        reader, scanner = self._reader, ObjectScanner()
        reader.unmark()
        self._begin(name)
        while True:
            end = scanner.end(reader.text)
            self._argue(reader.take(end if end >= 0 else len(reader.text)))
            if end >= 0 or reader.is_over:
                return
            yield

    def _whole_object(self) -> Steps[str | None]:
        """Takes the object that the text begins with; None if it does not end."""
        reader, scanner, num_scanned = self._reader, ObjectScanner(), 0
        while (end := scanner.end(reader.text, num_scanned)) < 0:
            num_scanned = len(reader.text)
            if reader.is_over:
                return None
            yield
        return reader.take(end)


def is_object(written: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(json.loads(written), dict)
    except (ValueError, RecursionError):
        return False


def _mistral_id() -> str:
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(_NUM_MISTRAL_ID_CHARS))

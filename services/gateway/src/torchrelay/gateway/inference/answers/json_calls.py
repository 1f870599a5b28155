"""Tool calls whose name and arguments are in a JSON object."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from torchrelay.gateway.inference.answers.parts import ParameterTypes
from torchrelay.gateway.inference.answers.syntax import ARGUMENTS, CALL_ID, CallSyntax
from torchrelay.gateway.inference.answers.text_reader import ObjectScanner, Steps
from torchrelay.gateway.inference.answers.tool_call_parser import ToolCallParser, is_object

_MAX_HEAD_CHARS: Final = 256  # of a call, up to its arguments
_MISTRAL_HEAD: Final = re.compile(
    rf"\s*([\w.-]{{1,64}})(?:{re.escape(CALL_ID)}[\w-]+)?(?:{re.escape(ARGUMENTS)})?\s*", re.ASCII
)
_DECODER: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonCalls(ToolCallParser):
    """``opening``, then an object or a list of objects, then perhaps ``closing``."""

    def __init__(self, syntax: CallSyntax, types: ParameterTypes) -> None:
        super().__init__(syntax, types)
        keys = "|".join(map(re.escape, syntax.arguments_keys))
        self._head = re.compile(
            rf'\{{\s*"{re.escape(syntax.name_key)}"\s*:\s*"([^"\\]+)"\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)'
        )

    def _read(self) -> Steps[None]:
        reader, opening = self._reader, self._syntax.opening
        while (gap := (yield from self._content_until(opening))) is not None:
            reader.mark()
            if (yield from self._calls()):
                yield from self._close()
            else:
                self._refuse(gap + opening)

    def _calls(self) -> Steps[bool]:
        """Reads an object or a list of objects; whether there was a call."""
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.takes("[")):
            return (yield from self._object())
        first = self.num_calls
        yield from reader.space()
        while (yield from self._object()):
            reader.mark()
            yield from reader.space()
            if not (yield from reader.takes(",")):
                yield from reader.takes("]")
                return True
            yield from reader.space()
        if self.num_calls == first:
            return False
        self._refuse("")
        return True

    def _object(self) -> Steps[bool]:
        """Reads a call's object; whether there is one."""
        reader, scanner, num_scanned = self._reader, ObjectScanner(), 0
        if not (yield from reader.begins_with("{")):
            return False
        while True:
            head = self._head.match(reader.text[:_MAX_HEAD_CHARS])
            if head is not None and head[1] in self._types:
                reader.take(head.end())
                yield from self._live_arguments(head[1])
                yield from self._rest()
                return True
            end = scanner.end(reader.text, num_scanned)
            if end >= 0:
                break
            num_scanned = len(reader.text)
            if reader.is_over:
                return False
            yield
        call = self._parsed(reader.take(end))
        if call is None:
            return False
        self._begin(call[0])
        self._argue(call[1])
        return True

    def _rest(self) -> Steps[None]:
        """Takes what follows the arguments in their object."""
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.takes("}")) and (yield from reader.takes(",")):
            scanner = ObjectScanner(depth=1)
            while (end := scanner.end(reader.text)) < 0:
                reader.take(len(reader.text))
                if reader.is_over:
                    return
                yield
            reader.take(end)

    def _parsed(self, written: str) -> tuple[str, str] | None:
        """The name and the arguments of a whole call."""
        try:
            fields = _DECODER.decode(written)
            name: Any = json.loads(bytes(fields[self._syntax.name_key]))
            key = next((key for key in self._syntax.arguments_keys if key in fields), "")
            arguments: Any = bytes(fields[key]).decode() if key else "{}"
            if arguments.startswith('"'):  # some models write the object as a string
                arguments = json.loads(arguments).strip()
            if arguments in ("", "null"):
                arguments = "{}"
        except (KeyError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
            return None
        return (name, arguments) if isinstance(name, str) and is_object(arguments) else None


class MistralCalls(JsonCalls):
    """``JsonCalls``, and calls with the name before the object of the arguments."""

    def _calls(self) -> Steps[bool]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.begins_with("[")) or (yield from reader.begins_with("{")):
            return (yield from super()._calls())
        while "{" not in reader.text[:_MAX_HEAD_CHARS]:
            if reader.is_over or len(reader.text) >= _MAX_HEAD_CHARS:
                return False
            yield
        head = _MISTRAL_HEAD.fullmatch(reader.text[: reader.text.index("{")])
        if head is None:
            return False
        reader.take(head.end())
        return (yield from self._arguments(head[1]))


class LlamaCalls(JsonCalls):
    """Objects separated by semicolons: at the beginning of the text, or after ``opening``."""

    def _read(self) -> Steps[None]:
        reader, opening = self._reader, self._syntax.opening
        before: str | None = ""
        while before is not None:
            reader.mark()
            yield from reader.space()
            if not (yield from self._calls()):
                self._refuse(before)
            gap = yield from self._content_until(opening)
            before = None if gap is None else gap + opening

    def _calls(self) -> Steps[bool]:
        reader, first = self._reader, self.num_calls
        while (yield from self._object()):
            reader.mark()
            yield from reader.space()
            if not (yield from reader.takes(";")):
                reader.restore()
                return True
            yield from reader.space()
        if self.num_calls == first:
            return False
        self._refuse("")
        return True

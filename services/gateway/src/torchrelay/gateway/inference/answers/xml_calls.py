"""Tool calls whose name and arguments are in tags, as Qwen3-Coder writes them."""

from __future__ import annotations

import json
from typing import Final

from torchrelay.gateway.inference.answers.text_reader import Steps, num_begun
from torchrelay.gateway.inference.answers.tool_call_parser import ToolCallParser
from torchrelay.gateway.inference.answers.value_types import ALL_TYPES, allowed_types, value_types

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME_CHARS: Final = 256
_PYTHON_SPELLINGS: Final = {"True": "true", "False": "false", "None": "null"}  # as the models' templates print values


class XmlCalls(ToolCallParser):
    """``opening``, ``<function=NAME>``, a ``<parameter=KEY>`` for each argument, ``</function>``, ``closing``.

    A value is JSON of a type that the tool allows for it, and otherwise a text. A call that breaks off has the values
    as far as the model wrote them.
    """

    def _read(self) -> Steps[None]:
        reader, opening = self._reader, self._syntax.opening
        while (gap := (yield from self._content_until(opening))) is not None:
            reader.mark()
            if (yield from self._call()):
                yield from self._close()
            else:
                self._refuse(gap + opening)

    def _call(self) -> Steps[bool]:
        """Reads a function; whether it is a call."""
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.takes(_FUNCTION)):
            return False
        name = yield from reader.until(">", _MAX_NAME_CHARS)
        if not name:
            return False
        is_live, arguments = name in self._types, ["{"]
        if is_live:
            reader.unmark()
            self._begin(name)
            self._argue(arguments.pop())
        is_first = True
        while (key := (yield from self._key())) is not None:
            value = yield from reader.until(_PARAMETER_END)
            begin = f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: "
            if value is None:
                begun = reader.take(len(reader.text))  # of a call that is not live, the mark keeps it
                if is_live:
                    self._argue(begin + self._begun_json(name, key, begun))
                return is_live
            arguments.append(begin + self._json(name, key, value))
            is_first = False
            if is_live:
                self._argue(arguments.pop())
            yield from reader.space()
        if not (yield from reader.takes(_FUNCTION_END)):
            if reader.is_over and any(tag.startswith(reader.text) for tag in (_PARAMETER, _FUNCTION_END)):
                reader.take(len(reader.text))
            return is_live
        if not is_live:
            self._begin(name)
        self._argue("".join([*arguments, "}"]))
        return True

    def _key(self) -> Steps[str | None]:
        """Takes the tag that opens a parameter; returns its key."""
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.takes(_PARAMETER)):
            return None
        key = yield from reader.until(">", _MAX_NAME_CHARS)
        if key is None and reader.is_over:
            reader.take(len(reader.text))
        return key

    def _json(self, name: str, key: str, text: str) -> str:
        """The JSON of a value, which is a text where its type allows no other reading."""
        text = text.removeprefix("\n").removesuffix("\n")
        allowed = allowed_types(self._types.get(name, {}), key)
        written = text.strip()
        if allowed != ALL_TYPES:
            written = _PYTHON_SPELLINGS.get(written, written)
        if "string" in allowed and (allowed == {"string"} or (allowed != ALL_TYPES and written.startswith('"'))):
            return json.dumps(text, ensure_ascii=False)
        try:
            value = json.loads(written, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        is_text = "string" in allowed and not value_types(value) & allowed
        return json.dumps(text, ensure_ascii=False) if is_text else written

    def _begun_json(self, name: str, key: str, text: str) -> str:
        """The JSON of a value that breaks off."""
        text = text[: len(text) - num_begun(text, _PARAMETER_END)].removeprefix("\n")
        if "string" in allowed_types(self._types.get(name, {}), key):
            return json.dumps(text, ensure_ascii=False)[:-1]
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")

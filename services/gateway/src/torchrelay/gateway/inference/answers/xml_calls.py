"""Tool calls whose name and arguments are in tags, as Qwen3-Coder writes them."""

from __future__ import annotations

import json
from typing import Final

from torchrelay.gateway.inference.answers.text_reader import Steps
from torchrelay.gateway.inference.answers.tool_call_parser import ToolCallParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME_CHARS: Final = 256


class XmlCalls(ToolCallParser):
    """``opening``, ``<function=NAME>``, a ``<parameter=KEY>`` for each argument, ``</function>``, ``closing``.

    A value is JSON, or a text where the tool declares a string or it is no JSON.
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
            if value is None:
                if is_live:
                    self._refuse("")
                return is_live
            separator = "" if is_first else ", "
            arguments.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: {self._json(name, key, value)}")
            is_first = False
            if is_live:
                self._argue(arguments.pop())
            yield from reader.space()
        if not (yield from reader.takes(_FUNCTION_END)):
            return is_live
        if not is_live:
            self._begin(name)
        self._argue("".join([*arguments, "}"]))
        return True

    def _key(self) -> Steps[str | None]:
        """Takes the tag that opens a parameter; returns its key."""
        yield from self._reader.space()
        if not (yield from self._reader.takes(_PARAMETER)):
            return None
        return (yield from self._reader.until(">", _MAX_NAME_CHARS))

    def _json(self, name: str, key: str, value: str) -> str:
        value = value.removeprefix("\n").removesuffix("\n")
        if self._types.get(name, {}).get(key) != "string":
            try:
                json.loads(value, parse_constant=_refuse)
                return value.strip()
            except (ValueError, RecursionError):
                pass
        return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")

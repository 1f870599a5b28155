"""Text that JSON can spell and no answer, database or header can hold: lone surrogates and NUL characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from torchrelay.common.errors import InvalidRequest

_SUSPECT = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def check_text(encoded: bytes | bytearray, *, allows_nul: bool = False) -> None:
    """Raises ``InvalidRequest`` about a string of a JSON body with a lone surrogate, or a NUL if that is not allowed.

    The time is proportional to the number of values: callers bound it.
    """
    if _SUSPECT.search(encoded) is None:
        return
    try:
        body = json.loads(encoded)
        text = json.dumps(body, ensure_ascii=False)
    except (ValueError, RecursionError):
        return  # whoever decodes it says so
    if _SURROGATE.search(text):
        field = _field(body, lambda value: _SURROGATE.search(value) is not None)
        raise InvalidRequest(f"{field or 'the body'} has a lone surrogate, which is no character", field=field)
    if not allows_nul and _ENCODED_NUL.search(text):
        field = _field(body, lambda value: "\0" in value)
        raise InvalidRequest(f"{field or 'the body'} must not have a NUL character", field=field)


def _field(body: Any, is_faulty: Callable[[str], bool]) -> str | None:
    """The path of the first faulty string, or of the object with a faulty name; None for the body itself."""
    path: list[str] = []
    levels: list[Iterator[tuple[str, Any]]] = [iter([("", body)])]
    while levels:
        for name, value in levels[-1]:
            if isinstance(value, dict):
                faulty, inner = any(map(is_faulty, value)), iter(value.items())
            elif isinstance(value, list):
                faulty, inner = False, ((str(index), each) for index, each in enumerate(value))
            else:
                faulty, inner = isinstance(value, str) and is_faulty(value), iter(())
            if faulty:
                return ".".join([*path, name][1:]) or None
            if isinstance(value, dict | list):
                path.append(name)
                levels.append(inner)
                break
        else:
            levels.pop()
            if path:
                path.pop()
    return None

"""Text that JSON can spell and no answer, database or header can hold: lone surrogates and NUL characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from torchrelay.common.errors import InvalidRequest

_SUSPECT = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_SURROGATE, _NUL = re.compile("[\ud800-\udfff]"), re.compile("\0")
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
        field = _field(body, _SURROGATE)
        raise InvalidRequest(f"{field or 'the body'} has a lone surrogate, which is no character", field=field)
    if not allows_nul and _ENCODED_NUL.search(text):
        field = _field(body, _NUL)
        raise InvalidRequest(f"{field or 'the body'} must not have a NUL character", field=field)


def _field(body: Any, fault: re.Pattern[str]) -> str | None:
    """The path of the first faulty string, or of the object with a faulty name; None for the body itself."""
    path: list[str | int] = []
    levels: list[Iterator[tuple[str | int, Any]]] = [iter([("", body)])]
    while levels:
        for name, value in levels[-1]:
            is_object = isinstance(value, dict)
            if any(map(fault.search, value)) if is_object else isinstance(value, str) and fault.search(value):
                return ".".join(map(str, [*path, name][1:])) or None
            if is_object or isinstance(value, list):
                path.append(name)
                levels.append(iter(value.items()) if is_object else enumerate(value))
                break
        else:
            levels.pop()
            if path:
                path.pop()
    return None

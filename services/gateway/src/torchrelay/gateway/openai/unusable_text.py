"""Text that JSON can spell and no answer, database or header can hold: lone surrogates and NUL characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from torchrelay.common.errors import InvalidRequest

_SUSPECT = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(encoded: bytes | bytearray, *, allows_nul: bool = False) -> None:
    """Raises ``InvalidRequest`` about the first string of a JSON body with a lone surrogate, or a NUL if that is not
    allowed.
    """
    if _SUSPECT.search(encoded) is None:
        return
    try:
        body = json.loads(encoded)
    except (ValueError, RecursionError):
        return  # whoever decodes it says so
    for path, text in _strings(body, ""):
        if _SURROGATE.search(text):
            raise InvalidRequest(
                f"{path or 'the body'} has a lone surrogate, which is no character", field=path or None
            )
        if "\0" in text and not allows_nul:
            raise InvalidRequest(f"{path or 'the body'} must not have a NUL character", field=path or None)


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """All strings within a JSON value, keys too, each with the path of its field."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield path, key
            yield from _strings(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _strings(inner, f"{path}.{index}".lstrip("."))

"""JSON bodies into structs, with errors that name the field at fault."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.inference.misspelt import misspelt

B = TypeVar("B", bound=msgspec.Struct)
_NAMES: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r" - at `\$\.?(\w*)[^`]*`$")
_FIELD = re.compile(r"required field `(\w+)`")
_MAX_LOOKED_AT = 1 << 16  # bytes: looking for a wrong number costs seconds in a body of megabytes


def decode(decoder: msgspec.json.Decoder[B], encoded: bytes) -> B:
    """Raises ``InvalidRequest``."""
    try:
        body = decoder.decode(encoded)
        if slip := misspelt(_NAMES.decode(encoded).keys(), type(body).__struct_fields__):
            raise InvalidRequest(f"{slip[0]} is not known: is {slip[1]} meant?", field=slip[0])
        return body
    except msgspec.ValidationError as error:
        message = str(error)
        path, field = _PATH.search(message), _FIELD.search(message)
        name = path[1] if path and path[1] else field[1] if field else None
        raise InvalidRequest(f"{name}: {_PATH.sub('', message)}" if name else message, field=name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if number := _not_a_number(encoded):
            said = f"{number}: JSON has no NaN and no infinity; it must be a finite number"
            raise InvalidRequest(said, field=number) from error
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _not_a_number(encoded: bytes) -> str | None:
    """The field in which a body, otherwise JSON, has NaN or an infinity as Python's own encoder writes them."""
    if len(encoded) > _MAX_LOOKED_AT or (b"NaN" not in encoded and b"Infinity" not in encoded):
        return None
    try:
        body = json.loads(encoded)
        fields = body.items() if isinstance(body, dict) else ()
        return next((name for name, value in fields if not _is_finite(value)), None)
    except (ValueError, RecursionError):
        return None


def _is_finite(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, inner)) and (not isinstance(value, float) or math.isfinite(value))

"""The rule for names of tenants and models."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def is_name(name: str) -> bool:
    """Whether this is a valid name for a tenant or a model."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, field: str) -> str:
    """Returns a valid ``name``. Raises ``InvalidRequest`` about ``field`` otherwise."""
    if not is_name(name):
        rule = "1 to 64 characters of a-z, 0-9, '.', '_' and '-', starting with a letter or digit"
        raise InvalidRequest(f"{name!r} is not a valid name: {rule}", field=field)
    return name

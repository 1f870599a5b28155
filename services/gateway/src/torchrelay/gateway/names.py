"""The rule for names of tenants and models."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def is_name(name: str) -> bool:
    """Whether a tenant or a model can have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, field: str) -> str:
    """``name`` itself when it can name a tenant or a model. Raises ``InvalidRequest`` about ``field``."""
    if not is_name(name):
        rule = "1 to 64 of a-z, 0-9, '.', '_' and '-', the first a letter or digit"
        raise InvalidRequest(f"{name!r} is not a name: {rule}", field=field)
    return name

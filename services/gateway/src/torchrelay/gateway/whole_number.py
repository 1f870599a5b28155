"""Integers of JSON bodies, which clients without integers write as ``4.0``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole)]

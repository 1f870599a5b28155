"""The sentence of an exception that says why."""

from __future__ import annotations


def failure_reason(error: Exception) -> str:
    """The line of an exception's text that says why; a validation error of pydantic has it in its second or third."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error," in line), lines[0])

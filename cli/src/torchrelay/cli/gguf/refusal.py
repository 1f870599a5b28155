"""The refusal of a GGUF file."""

from __future__ import annotations

from pathlib import Path

from torchrelay.cli.errors import CliError

_MAX_QUOTED = 80


def refusal(path: Path, field: str, fault: str, hint: str = "nothing was sent") -> CliError:
    """The error that names the file, the field, and what is wrong with it."""
    return CliError(f"{path}: {field}: {fault}", hint, refuses_file=True)


def quoted(value: object) -> str:
    """A value of the file, for use in a message: printable and short."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."

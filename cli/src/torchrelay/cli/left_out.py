"""The note about the files that an upload leaves out."""

from __future__ import annotations


def left_out_note(names: list[str], reason: str = "the platform selects no template by name") -> list[str]:
    """A sentence about what an upload leaves out; none if that is nothing."""
    return [f"the upload leaves out {', '.join(names)}: {reason}"] if names else []

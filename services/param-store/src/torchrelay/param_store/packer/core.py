"""The nouns of the packer."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.transfer.manifest import Segment, TensorEntry

_MAX_DETAIL = 500  # characters; what a detail quotes is the tenant's


class PackRefused(Exception):
    """The folder cannot be published: ``file`` is where the fault lies, ``detail`` says what it is, cut short."""

    def __init__(self, file: str, detail: str) -> None:
        detail = detail if len(detail) <= _MAX_DETAIL else f"{detail[:_MAX_DETAIL]}..."
        super().__init__(f"{file}: {detail}")
        self.file = file
        self.detail = detail


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the upload; ``offset`` counts from the beginning of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackPlan:
    """Where every tensor goes: ``entries[i]`` of the pack is copied from ``sources[i]`` of the upload."""

    dtype: str
    entries: tuple[TensorEntry, ...]
    sources: tuple[StoredTensor, ...]
    segments: tuple[Segment, ...]
    num_bytes: int


def quoted(name: object) -> str:
    """A name out of the upload as it may stand in a message: printable, and not longer than a line."""
    text = repr(name)
    return text if len(text) <= 120 else f"{text[:117]}..."

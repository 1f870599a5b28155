"""Tensors, pack plans and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrelay.transfer.pack_layout import PackLayout

QUANTIZE = "quantize"  # the field of a commit, in place of a file, of a model that cannot be quantized
_MAX_LISTED = 3
_MAX_DETAIL = 500  # characters; details quote the tenant's files


class PackRefused(Exception):
    """The folder cannot be published: ``file`` is the faulty file, ``detail`` the fault, truncated."""

    def __init__(self, file: str, detail: str) -> None:
        detail = detail if len(detail) <= _MAX_DETAIL else f"{detail[:_MAX_DETAIL]}..."
        super().__init__(f"{file}: {detail}")
        self.file = file
        self.detail = detail


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the upload; ``offset`` counts from the start of its file. ``is_offset``: of int8 numbers, each stored
    plus 128. ``weight``: of int8 numbers, or of scales, the weight that they are made from, which is at ``offset``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int
    is_offset: bool = False
    weight: StoredTensor | None = None


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A pack to be written: ``layout.tensors[i]`` is copied from ``sources[i]`` of the upload; those in ``scales`` must
    be positive, those in ``required`` have these bytes. ``zeros`` are left out, and must be zero.
    """

    layout: PackLayout
    sources: tuple[StoredTensor, ...]
    notes: tuple[str, ...]  # a sentence for each departure from the upload: weights converted, or left out
    scales: frozenset[int] = frozenset()
    required: Mapping[int, bytes] = field(default_factory=dict)
    zeros: tuple[StoredTensor, ...] = ()


def quoted(name: object) -> str:
    """A name from the upload, for use in a message: printable and at most 120 characters long."""
    text = repr(name)
    return text if len(text) <= 120 else f"{text[:117]}..."


def listed(names: Sequence[str]) -> str:
    """The first names, for use in a note, and the number of the others."""
    shown = ", ".join(quoted(name) for name in names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED:,} more"

"""The messages between a worker and the further processes of its slot.

They are pickled, like vLLM's own between its processes, and go through two pipes without a name, which only a worker
and the process that it has started hold. No socket carries them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# To a process: Open, then for each segment SegmentReady, one Start, and Calls, until Close. Fail may come at any time.


@dataclass(frozen=True, slots=True)
class Open:
    """Maps a slab of the host's arena. Answered by Done or Failed."""

    arena_path: str
    slab_offset: int
    slab_bytes: int
    compiled: str  # the folder to compile into; empty: the process's own


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """Takes a segment into use whose bytes are verified."""

    segment: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Declares that no more bytes will arrive."""

    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Makes vLLM's worker, and loads the weights. Answered by Done or Failed."""

    config: VllmConfig
    init_method: str  # where the processes of the group meet
    local_rank: int  # the number of its GPU


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a method of vLLM's worker. Answered by Done or Failed."""

    method: Any  # the name, or a function of the worker
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wants_result: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Releases the model and the mapping. Answered by Closed."""


# From a process: Imported at first, then the answers.


@dataclass(frozen=True, slots=True)
class Imported:
    """vLLM is imported."""


@dataclass(frozen=True, slots=True)
class Done:
    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    pass

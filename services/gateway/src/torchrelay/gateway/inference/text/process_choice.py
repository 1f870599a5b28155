"""Which text process takes a prompt. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from torchrelay.gateway.inference.text.frames import FileId

PATIENCE_S = 0.1  # a prompt waits so long for the process that has its tokenizer: loading it elsewhere takes longer


@dataclass(slots=True, eq=False)
class ProcessState:
    """What a process has and does. ``held``: bytes of memory by file, the least recently used first."""

    since_s: float  # when it began what it does, or became idle
    is_busy: bool = False
    is_slow: bool = False  # busy for longer than ``PATIENCE_S``
    held: OrderedDict[FileId, int] = field(default_factory=OrderedDict)

    @property
    def num_bytes(self) -> int:
        return sum(self.held.values())

    def to_forget(self, num_needed: int, kept: Collection[FileId], max_bytes: int) -> tuple[FileId, ...]:
        """What goes, so that ``num_needed`` bytes fit if they can, and ``kept`` stays."""
        excess = self.num_bytes + num_needed - max_bytes
        forgotten: list[FileId] = []
        for file, num_bytes in self.held.items():
            if excess <= 0:
                break
            if file not in kept:
                forgotten.append(file)
                excess -= num_bytes
        return tuple(forgotten)


def choose(processes: Collection[ProcessState], tokenizer: FileId) -> ProcessState | None:
    """The process for a prompt with this tokenizer; None: it waits.

    One that has the tokenizer, even if that will be free only in a moment; otherwise the one that has least to forget.
    """
    free = [process for process in processes if not process.is_busy]
    if not free:
        return None
    holders = [process for process in processes if tokenizer in process.held]
    for process in holders:
        if not process.is_busy:
            return process
    if not all(process.is_slow for process in holders):
        return None
    return min(free, key=lambda process: process.num_bytes)

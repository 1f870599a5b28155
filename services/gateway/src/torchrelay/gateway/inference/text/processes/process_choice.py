"""Which text process takes a prompt. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torchrelay.gateway.inference.text.processes.frames import FileId
from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru

PATIENCE_S = 0.1  # a prompt waits so long for the process that has its tokenizer: loading it elsewhere takes longer


@dataclass(slots=True, eq=False)
class ProcessState:
    """What a process has and does. ``held``: the files that it has loaded."""

    held: TenantLru[FileId]
    since_s: float  # when it began what it does, or became idle
    is_busy: bool = False
    is_slow: bool = False  # busy for longer than ``PATIENCE_S``


def choose(processes: Collection[ProcessState], tokenizer: FileId) -> ProcessState | None:
    """The process for a prompt with this tokenizer; None: it waits.

    One that has the tokenizer, even if that will be free only in a moment; otherwise the one that has least.
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
    return min(free, key=lambda process: process.held.num_bytes)

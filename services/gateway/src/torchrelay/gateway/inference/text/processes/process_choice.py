"""The choice of a text process for a prompt. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torchrelay.gateway.inference.text.processes.frames import FileId
from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru

MAX_BUSY_S = 0.1  # a prompt waits this long for the process with its tokenizer: loading it elsewhere takes longer


@dataclass(slots=True, eq=False)
class ProcessState:
    """A process's files and activity. ``held``: the loaded files."""

    held: TenantLru[FileId]
    since_s: float  # when it became busy or idle
    is_busy: bool = False
    is_slow: bool = False  # busy for longer than ``MAX_BUSY_S``


def choose(processes: Collection[ProcessState], tokenizer: FileId) -> ProcessState | None:
    """The process for a prompt with this tokenizer; None if the prompt must wait.

    A process that has the tokenizer, even if it is free only in a moment; otherwise the one that has the fewest bytes.
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

"""The disk of a home: what has to be free, what may fill it, and what to say about it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.common.host.disk import free_bytes
from torchrelay.common.quantities import format_bytes

NEEDED_BYTES = 32 << 20  # to start: ledger, streams and logs begin small
LOW_BYTES = 512 << 20
FULL_BYTES = 4 << 20
MAX_LOG_BYTES, MIN_LOG_BYTES = 32 << 20, 256 << 10


class DiskState(Enum):
    """The state of the disk by its free space."""

    ROOMY = "roomy"
    LOW = "low"
    FULL = "full"


def disk_state(num_free_bytes: int, before: DiskState = DiskState.ROOMY) -> DiskState:
    """The state after ``before``. It is left with twice the space at which it begins."""
    if num_free_bytes < FULL_BYTES * (2 if before is DiskState.FULL else 1):
        return DiskState.FULL
    if num_free_bytes < LOW_BYTES * (1 if before is DiskState.ROOMY else 2):
        return DiskState.LOW
    return DiskState.ROOMY


def log_limit_bytes(num_free_bytes: int) -> int:
    """Largest size of a log or the file of traces, so that they do not fill a small disk by themselves."""
    return max(min(MAX_LOG_BYTES, num_free_bytes // 32), MIN_LOG_BYTES)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files below ``folder``; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_disk(folder: Path) -> None:
    """Raises ``CliError`` when too little is free to start."""
    num_free = free_bytes(folder)
    if num_free < NEEDED_BYTES:
        raise CliError(
            f"the disk of {folder} has {format_bytes(num_free)} free; a start takes {format_bytes(NEEDED_BYTES)}",
            "free some space there, or choose a --home on another disk",
        )


def disk_message(state: DiskState, folder: Path, num_free_bytes: int) -> str:
    """The message for the operator."""
    free = f"the disk of {folder} has {format_bytes(num_free_bytes)} free"
    return {
        DiskState.ROOMY: f"{free}: enough",
        DiskState.LOW: f"{free}: little; large uploads are refused, and logs are kept short",
        DiskState.FULL: f"{free}: it is full; requests are refused until you free some space there",
    }[state]

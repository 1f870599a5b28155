"""Machines of a cluster that are all this host: processes are told apart by variables of their environment."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.support.wait import wait_until

_ARENA = b"TORCHRELAY_ARENA_PATH="


class Fleet(Protocol):
    """A running engine with two machines, which has room for a worker on each."""

    @property
    def engine(self) -> str:
        """As `up --on` takes it."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What `up` needs to reach it."""

    def machine_of(self, worker_id: str) -> str:
        """The machine on which the worker runs."""

    def kill(self, machine: str) -> None:
        """Kills everything on the machine, as if it lost power."""


def variables_of(worker_id: str) -> dict[str, str]:
    """The environment of the worker's program. Raises ``AssertionError`` unless there is exactly one."""
    (pid,) = programs(worker_id)
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if b"=" in pair)


def programs(worker_id: str) -> list[int]:
    """The processes of `torchrelay join` that run the worker."""
    return [pid for pid, path in _processes() if {b"join", worker_id.encode()} <= _parts(path / "cmdline")]


def kill_all(*variables: str) -> None:
    """Kills the processes whose environment has all of these, as ``NAME=VALUE``, until none is left.

    Their arenas are removed, as the memory of a machine that loses power.
    """
    wanted = {variable.encode() for variable in variables}
    arenas: set[bytes] = set()

    def are_gone() -> bool:
        """Kills those that live, once all are known: the end of one may end others."""
        living = {pid: parts for pid, path in _processes() if wanted <= (parts := _parts(path / "environ"))}
        arenas.update(
            part.removeprefix(_ARENA) for parts in living.values() for part in parts if part.startswith(_ARENA)
        )
        for pid in living:  # they may have started others meanwhile
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    wait_until(are_gone, f"the end of all processes of {variables}")
    for arena in arenas:
        Path(arena.decode()).unlink(missing_ok=True)


def _processes() -> Iterator[tuple[int, Path]]:
    for path in Path("/proc").glob("[0-9]*"):
        yield int(path.name), path


def _parts(file: Path) -> set[bytes]:
    try:
        return set(file.read_bytes().split(b"\0"))
    except OSError:  # it has ended
        return set()

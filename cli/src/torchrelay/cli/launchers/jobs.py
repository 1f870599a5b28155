"""Jobs on other machines: each runs `torchrelay join` with one worker."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchrelay.cli.join_file import JoinFile


class JobError(Exception):
    """The engine of the jobs does not answer, or refuses; the message names what was asked, and the reason."""


class Jobs(Protocol):
    """The jobs of one platform on an engine. All methods raise ``JobError``."""

    output: str  # where an operator reads what a job printed

    async def listed(self) -> Mapping[str, str | None]:
        """The workers whose jobs have not ended, and for each why its job waits. None: it has begun to run."""

    async def start(self, worker_id: str) -> None:
        """Submits a job, which begins when the engine has a place for it."""

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        """Cancels a job that waits; tells a running one to leave with its grace, or ends it ``at_once``.

        Does not wait for its end, which it may have reached before.
        """

    async def close(self) -> None:
        """Ends the connection to the engine; the jobs run on."""


@dataclass(frozen=True, slots=True)
class JobProgram:
    """The program of every job, `torchrelay join`. Sizes of 0 are chosen on its machine."""

    join_file: JoinFile
    jobs_name: str  # the same for all jobs of the platform, and in each run of its `up`
    device: str = "auto"
    threads: int = 0
    arena_bytes: int = 0
    kv_pool_bytes: int = 0
    labels: tuple[str, ...] = ()

    def arguments(self, worker_id: str, file: str = "-") -> list[str]:
        """Arguments without --host-id, which the machine decides. ``file``: the join file, by default the input."""
        device = "cuda" if self.device.startswith("cuda") else self.device  # a job has a GPU of its own
        arguments = ["join", file, "--worker-id", worker_id, "--device", device]
        sizes = {
            "--threads": self.threads,
            "--arena-mb": self.arena_bytes >> 20,
            "--kv-pool-mb": self.kv_pool_bytes >> 20,
        }
        for option, size in sizes.items():
            if size:
                arguments += [option, str(size)]
        for label in self.labels:
            arguments += ["--label", label]
        return arguments


def script() -> str:
    """The path of this installation's program."""
    return str(Path(sys.executable).parent / "torchrelay")

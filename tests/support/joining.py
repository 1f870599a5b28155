"""Programs by which machines join a platform."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.platform import SCRIPTS, Platform
from tests.support.wait import wait_until
from torchrelay.control.v1 import reports_pb2

SIZES = ("--device", "cpu", "--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1")


@dataclass(frozen=True, slots=True)
class Joined:
    """A running `torchrelay join`."""

    process: subprocess.Popen[bytes]
    log: Path

    def leave(self) -> int:
        """Its exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def joined(platform: Platform, folder: Path, host_id: str, *options: str, grace_s: float = 15.0) -> Iterator[Joined]:
    """A program that has joined as a machine of its own, with one worker unless the options say otherwise."""
    folder.mkdir(mode=0o700, exist_ok=True)
    log = folder.parent / f"{'-'.join((folder.name, *options))}.log"
    command = [str(SCRIPTS / "torchrelay"), "join", str(platform.home.path / "join.toml"), "--host-id", host_id]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--home", str(folder), *SIZES, *options],
            stdout=output,
            stderr=output,
            env={**os.environ, "TORCHRELAY_GRACE_S": str(grace_s)},
            cwd=folder,
        )
    try:
        yield Joined(process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        sys.stdout.write(log.read_text())


def await_workers(platform: Platform, *worker_ids: str) -> None:
    """Until the scheduler knows exactly these workers, all of which it may use."""

    def are_there() -> bool:
        usable = {
            worker.worker_id
            for worker in next(platform.views()).workers
            if worker.slot.state != reports_pb2.SlotState.STATE_UNSPECIFIED
        }
        return usable == set(worker_ids)

    wait_until(are_there, f"workers {worker_ids}")

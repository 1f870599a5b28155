"""The scheduler's process with a heartbeat on its event loop, which notes how long the loop stalls.

    python -m bench.scheduling.heartbeat FILE [OPTION ...]      with the options of torchrelay-scheduler

A beat is due every 5 ms. Each beat that is late adds a line to FILE: the time of the machine's monotonic clock, how
late the beat is, and the CPU time that the loop's thread has taken since the previous beat, all in seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

import uvloop

from torchrelay.scheduler.main import main

BEAT_S = 0.005
LEAST_S = 0.001  # the resolution of the loop's timers


@dataclass(frozen=True, slots=True)
class Stall:
    at: float
    late_s: float
    cpu_s: float

    @property
    def own_s(self) -> float:
        """The stall without the time in which the machine ran other processes; up to a beat too long."""
        return min(self.late_s, self.cpu_s)

    def __str__(self) -> str:
        return f"{self.late_s * 1e3:.1f} ms by the clock"


def longest_stall(path: Path, since: float) -> Stall:
    """The longest stall after ``since`` of the process that writes the file."""
    stalls = [Stall(*map(float, line.split())) for line in path.read_text().splitlines()]
    return max((each for each in stalls if each.at >= since), key=lambda each: each.own_s, default=Stall(since, 0, 0))


class Heartbeat:
    def __init__(self, loop: asyncio.AbstractEventLoop, file: TextIO) -> None:
        self._loop, self._file = loop, file
        self._due_at, self._cpu_s = time.monotonic() + BEAT_S, time.thread_time()
        loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        now, cpu_s = time.monotonic(), time.thread_time()
        if now > self._due_at + LEAST_S:
            self._file.write(f"{now} {now - self._due_at} {cpu_s - self._cpu_s}\n")
        self._due_at, self._cpu_s = now + BEAT_S, cpu_s
        self._loop.call_later(BEAT_S, self._beat)


def run(path: str) -> None:
    new_loop = uvloop.new_event_loop
    with open(path, "w", buffering=1) as file:

        def loop_with_heartbeat() -> asyncio.AbstractEventLoop:
            loop = new_loop()
            Heartbeat(loop, file)
            return loop

        with patch.object(uvloop, "new_event_loop", loop_with_heartbeat):
            main()


if __name__ == "__main__":
    run(sys.argv.pop(1))

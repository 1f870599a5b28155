"""The heartbeat of an event loop: what it notes of a loop that stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.scheduling.heartbeat import BEAT_S, Heartbeat, longest_stall

STALL_S = 0.05


def compute() -> None:
    end = time.thread_time() + STALL_S
    while time.thread_time() < end:
        pass


def wait() -> None:
    time.sleep(STALL_S)


@pytest.mark.parametrize(("block", "is_busy"), [(compute, True), (wait, False)])
def test_stall_of_the_process_counts_and_waiting_does_not(
    block: Callable[[], None], is_busy: bool, tmp_path: Path
) -> None:
    begin = time.monotonic()

    async def stall() -> None:
        Heartbeat(asyncio.get_running_loop(), file)
        block()
        await asyncio.sleep(BEAT_S)  # the beat is due before

    with (tmp_path / "beats").open("w", buffering=1) as file:
        asyncio.run(stall())
    late_s = [float(line.split()[1]) for line in (tmp_path / "beats").read_text().splitlines()]
    assert max(late_s) >= 0.8 * STALL_S
    assert (longest_stall(tmp_path / "beats", begin).own_s >= 0.8 * STALL_S) is is_busy

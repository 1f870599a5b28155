"""Requests are compared with the machine's resources."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.machine import (
    Machine,
    available_cores,
    available_memory_bytes,
    check_arena,
    check_kv_pools,
    check_threads,
)

GIB = 1 << 30
MACHINE = Machine(num_cores=2, memory_bytes=8 * GIB, shared_memory_bytes=4 * GIB)


def test_limits_are_inclusive() -> None:
    checks: list[tuple[Callable[[int], None], int]] = [
        (lambda asked: check_threads(asked, MACHINE), 2),
        (lambda asked: check_kv_pools(asked, MACHINE), 8 * GIB),
        (lambda asked: check_arena(asked, 0, MACHINE), 4 * GIB),
        (lambda asked: check_arena(asked, 1 * GIB, MACHINE), 5 * GIB),  # a part is there from an earlier run
    ]
    for check, most in checks:
        check(most)
        with pytest.raises(InvalidRequest):
            check(most + 1)
    check_arena(100 * GIB, 0, Machine(2, None, None))


def test_excess_request_names_setting_and_machine() -> None:
    with pytest.raises(InvalidRequest, match="3 threads are asked for and this machine has 2 cores") as threads:
        check_threads(3, MACHINE)
    with pytest.raises(
        InvalidRequest, match=r"9\.66 GB are asked for KV and 8\.59 GB of memory are available"
    ) as pools:
        check_kv_pools(9 * GIB, MACHINE)
    with pytest.raises(InvalidRequest, match=r"an arena of 5\.37 GB .* 4\.29 GB of /dev/shm are free") as arena:
        check_arena(5 * GIB, 0, MACHINE)
    with pytest.raises(InvalidRequest, match=r"an arena of 9\.66 GB .* 8\.59 GB of memory are available"):
        check_arena(9 * GIB, 0, Machine(2, 8 * GIB, 100 * GIB))
    assert [error.value.field for error in (threads, pools, arena)] == ["threads", "kv_pool_bytes", "arena_bytes"]


def test_container_cpu_limit_counts(tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert available_cores(tmp_path) == num_cores
    for limit, expected in (("max 100000", num_cores), ("50000 100000", 1), ("100001 100000", 2), ("900000 1000", 900)):
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
        assert available_cores(tmp_path) == min(expected, num_cores)


def test_container_memory_limit_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 8192
    for name, text in (("max", "max"), ("current", "5000"), ("stat", "anon 4000\ninactive_file 1000")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert available_memory_bytes(meminfo, tmp_path) == 8192
    (tmp_path / "memory.max").write_text("6000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 2000
    assert available_memory_bytes(tmp_path / "absent", tmp_path / "absent") is None

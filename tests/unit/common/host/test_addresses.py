"""Addresses of IPv4 and IPv6; requests are compared with the machine's resources."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.addresses import join_address, listening_socket, plain_host, split_address
from torchrelay.common.host.machine import (
    Machine,
    available_cores,
    available_memory_bytes,
    check_arena,
    check_kv_pools,
    check_threads,
)


@pytest.mark.parametrize(
    ("host", "joined", "plain"),
    [
        ("127.0.0.1", "127.0.0.1:80", "127.0.0.1"),
        ("::1", "[::1]:80", "::1"),
        ("[::1]", "[::1]:80", "::1"),
        ("gateway", "gateway:80", "gateway"),
    ],
)
def test_address_is_joined_and_split(host: str, joined: str, plain: str) -> None:
    assert join_address(host, 80) == joined
    assert split_address(joined) == (plain, 80)
    assert plain_host(host) == plain


@pytest.mark.parametrize("wrong", ["", "80", "host:", "host:http", "host:²"])
def test_address_without_port_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="not a valid address of the form host:port"):
        split_address(wrong)


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("[::1]", ["::1"]),
        ("::", ["::1", "127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
    ],
)
def test_socket_listens_on_both_families_where_asked(host: str, reached_at: list[str]) -> None:
    with listening_socket(host, 0) as listening:
        port = listening.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as client:
                assert (client.connect_ex((address, port)) == 0) is (address in reached_at)


GIB = 1 << 30
MACHINE = Machine(num_cores=2, memory_bytes=8 * GIB, shared_memory_bytes=4 * GIB)


def test_limits_are_inclusive() -> None:
    checks: list[tuple[Callable[[int], None], int]] = [
        (lambda asked: check_threads(asked, MACHINE), 2),
        (lambda asked: check_kv_pools(asked, MACHINE.memory_bytes), 8 * GIB),
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
        check_kv_pools(9 * GIB, MACHINE.memory_bytes)
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


def test_limits_of_all_enclosing_cgroups_count(tmp_path: Path) -> None:
    """A batch job and a unit of systemd have cgroups below the root, of either version."""
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemAvailable: 8 kB\n")
    job = tmp_path / "memory" / "slurm" / "job"
    job.mkdir(parents=True)
    for lines in ("4:memory:/slurm/job\n3:cpu,cpuacct:/\n0::/\n", "4:memory:/slurm/job/step\n"):
        own.write_text(lines)
        for folder, limit in ((job, 7000), (job.parent, 6000)):
            for name, text in (("limit_in_bytes", limit), ("usage_in_bytes", 5000)):
                (folder / f"memory.{name}").write_text(f"{text}\n")
            (folder / "memory.stat").write_text("total_inactive_file 1000\n")
        assert available_memory_bytes(meminfo, tmp_path, own) == 2000
    unit = tmp_path / "system.slice" / "up.service"
    unit.mkdir(parents=True)
    own.write_text("0::/system.slice/up.service\n")
    (unit.parent / "cpu.max").write_text("100000 100000\n")
    assert available_cores(tmp_path, own) == 1


def test_real_cgroup_bounds_the_memory_of_a_process() -> None:
    folder = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes" if folder.is_dir() else "memory.max"
    group = (folder if folder.is_dir() else folder.parent) / f"torchrelay-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(512 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    else:
        program = (
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
            "from torchrelay.common.host.machine import Machine; print(Machine.here().memory_bytes)"
        )
        child = subprocess.run(
            [sys.executable, "-c", program, group / "cgroup.procs"], capture_output=True, text=True, check=True
        )
        assert 0 < int(child.stdout) <= 512 << 20
    finally:
        if group.is_dir():
            group.rmdir()


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

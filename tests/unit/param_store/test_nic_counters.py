"""Counters of network interfaces, from files like the kernel's and from the kernel's."""

from __future__ import annotations

from pathlib import Path

from tests.unit.param_store.running_store import running_store
from torchrelay.param_store.nic_counters import NicCounters, read_nic_counters

HEAD = "Inter-|   Receive  |  Transmit\n face |bytes    packets errs drop fifo |bytes    packets errs\n"


def counters(folder: Path, **rows: tuple[int, int]) -> Path:
    lines = [f"{name:>6}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n" for name, (received, sent) in rows.items()]
    path = folder / "dev"
    path.write_text(HEAD + "".join(lines))
    return path


def a_device(folder: Path, name: str, speed: str, real: bool = True) -> None:
    (folder / name).mkdir()
    (folder / name / "speed").write_text(speed)
    if real:
        (folder / name / "device").mkdir()


def test_hardware_devices_summed_without_bridges(tmp_path: Path) -> None:
    a_device(tmp_path, "eth0", "10000\n")
    a_device(tmp_path, "eth1", "10000\n")
    a_device(tmp_path, "bond0", "20000\n", real=False)
    path = counters(tmp_path, lo=(7, 7), eth0=(100, 200), eth1=(1, 2), bond0=(101, 202))
    assert read_nic_counters(path, tmp_path) == NicCounters(202, 101, 2.5e9)


def test_namespace_counts_virtual_devices(tmp_path: Path) -> None:
    path = counters(tmp_path, lo=(7, 7), veth0=(100, 200))
    assert read_nic_counters(path, tmp_path) == NicCounters(200, 100)


def test_unknown_link_speed_is_zero(tmp_path: Path) -> None:
    a_device(tmp_path, "eth0", "-1\n")
    assert read_nic_counters(counters(tmp_path, eth0=(1, 2)), tmp_path) == NicCounters(2, 1)


def test_missing_counters_return_none(tmp_path: Path) -> None:
    assert read_nic_counters(tmp_path / "absent", tmp_path) is None
    assert read_nic_counters(counters(tmp_path, lo=(1, 2)), tmp_path) is None


def test_this_machine() -> None:
    traffic = read_nic_counters()
    assert traffic is None or (traffic.bytes_sent >= 0 and traffic.link_bytes_per_s >= 0)


async def test_store_reports_nic_counters(tmp_path: Path) -> None:
    before = read_nic_counters()
    async with running_store(tmp_path) as store:
        report = await store.report()
    assert report.HasField("nic") == (before is not None)
    if before is not None:
        assert report.nic.bytes_received >= before.bytes_received

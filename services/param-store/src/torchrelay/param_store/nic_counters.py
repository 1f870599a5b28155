"""Byte counters of the host's network interfaces, from Linux."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_COUNTERS = Path("/proc/self/net/dev")  # of this process's network namespace, unlike /sys
_DEVICES = Path("/sys/class/net")
_RECEIVED, _SENT = 0, 8  # columns
_MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class NicCounters:
    """Sums over all interfaces but loopback. ``link_bytes_per_s`` applies to each direction; 0: unknown."""

    bytes_sent: int
    bytes_received: int
    link_bytes_per_s: float = 0.0


def read_nic_counters(counters: Path = _COUNTERS, devices: Path = _DEVICES) -> NicCounters | None:
    """The current counters; None: the system has none."""
    try:
        lines = counters.read_text().splitlines()
    except OSError:
        return None
    columns = dict(_row(line) for line in lines if ":" in line)
    columns.pop("lo", None)
    # A bond or a bridge carries the traffic of its devices, so on a machine with hardware only hardware counts.
    hardware = [name for name in columns if (devices / name / "device").exists()]
    names = hardware or list(columns)
    if not names:
        return None
    return NicCounters(
        bytes_sent=sum(columns[name][_SENT] for name in names),
        bytes_received=sum(columns[name][_RECEIVED] for name in names),
        link_bytes_per_s=sum(_speed_mbit(devices / name) for name in names) * _MBIT,
    )


def _row(line: str) -> tuple[str, list[int]]:
    name, _, columns = line.partition(":")
    return name.strip(), [int(column) for column in columns.split()]


def _speed_mbit(device: Path) -> int:
    """The speed of a device; 0: it is down, or virtual and without a speed."""
    try:
        return max(int((device / "speed").read_text()), 0)
    except (OSError, ValueError):
        return 0

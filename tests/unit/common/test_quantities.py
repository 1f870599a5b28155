"""Counts, sizes and durations as texts."""

from __future__ import annotations

from torchrelay.common.quantities import format_bytes, format_count, format_duration


def test_count_uses_singular_for_one() -> None:
    assert [format_count(number, "chunk") for number in (0, 1, 2, 12_000)] == [
        "0 chunks",
        "1 chunk",
        "2 chunks",
        "12,000 chunks",
    ]


def test_sizes_have_three_digits() -> None:
    sizes = [0, 999, 1000, 1536, 999_600, 549_000, 4.29e9, 2.5e13]
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.54 kB",
        "1 MB",
        "549 kB",
        "4.29 GB",
        "25 TB",
    ]


def test_durations_have_three_digits() -> None:
    durations = [0, 0.0054, 0.34, 0.9996, 9.94, 99.46, 180, 1234.4, 259_200]
    assert [format_duration(seconds) for seconds in durations] == [
        "0 ms",
        "5.4 ms",
        "340 ms",
        "1 s",
        "9.94 s",
        "99.5 s",
        "180 s",
        "20.6 min",
        "72 h",
    ]

from __future__ import annotations

from torchrelay.common.sizes import format_bytes


def test_sizes_have_three_figures_and_the_next_unit_in_time() -> None:
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

"""One is not many."""

from __future__ import annotations

from torchrelay.common.quantities import format_count


def test_one_is_told_from_the_others() -> None:
    assert [format_count(number, "chunk") for number in (0, 1, 2, 12_000)] == [
        "0 chunks",
        "1 chunk",
        "2 chunks",
        "12,000 chunks",
    ]

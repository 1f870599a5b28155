"""Sizes of streams by the free space of the disk."""

from __future__ import annotations

import pytest

from torchrelay.cli.up.stream_sizes import stream_sizes
from torchrelay.common.net.nats_client import MIN_STREAM_BYTES, StreamSizes

MIB = 1 << 20


@pytest.mark.parametrize("num_free_mib", [0, 1, 100, 1000, 100_000])
def test_streams_take_at_most_eighth_of_disk(num_free_mib: int) -> None:
    sizes = stream_sizes(num_free_mib * MIB)
    least = StreamSizes(MIN_STREAM_BYTES, MIN_STREAM_BYTES)
    assert sizes == least or sizes.history_bytes + sizes.usage_bytes <= max(num_free_mib * MIB // 8, 2 * MIB)


def test_large_disk_gives_streams_full_size() -> None:
    assert stream_sizes(1 << 40) == StreamSizes()
    assert stream_sizes(100 * MIB) == StreamSizes(history_bytes=5 * MIB // 2, usage_bytes=10 * MIB)

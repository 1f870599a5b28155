"""Sizes of the streams of NATS that fit the disk of a home."""

from __future__ import annotations

from torchrelay.common.net.nats_client import MIN_STREAM_BYTES, StreamSizes


def stream_sizes(num_free_bytes: int) -> StreamSizes:
    """An eighth of ``num_free_bytes``, what the streams hold included: four fifths of it for usage registers."""
    most, budget_bytes = StreamSizes(), num_free_bytes // 8
    return StreamSizes(
        history_bytes=max(min(most.history_bytes, budget_bytes // 5), MIN_STREAM_BYTES),
        usage_bytes=max(min(most.usage_bytes, budget_bytes * 4 // 5), MIN_STREAM_BYTES),
    )

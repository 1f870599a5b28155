"""Buffers are split where asked, and nothing is lost in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.transfer.transport.iovec import drop_prefix, nonempty_views, take_prefix


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_pieces_add_up_to_whole_text(parts: list[bytes], sizes: list[int]) -> None:
    pending = nonempty_views(parts)
    pieces: list[bytes] = []
    while pending:
        size = sizes[len(pieces) % len(sizes)]
        piece = take_prefix(pending, size)
        assert 0 < sum(map(len, piece)) <= size
        drop_prefix(pending, sum(map(len, piece)))
        pieces.append(b"".join(piece))
    assert b"".join(pieces) == b"".join(parts)

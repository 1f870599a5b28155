from __future__ import annotations

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.clients.rechunk import rechunk


async def _body(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(1, 40))
async def test_body_is_cut_into_full_slices(pieces: list[bytes], slice_bytes: int) -> None:
    cut = [piece async for piece in rechunk(_body(pieces), slice_bytes)]
    assert b"".join(cut) == b"".join(pieces)
    assert all(len(piece) == slice_bytes for piece in cut[:-1])
    assert all(0 < len(piece) <= slice_bytes for piece in cut)

"""Chunk ranges cover a pack exactly, segments need the chunks they overlap, and the encoding is canonical."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transfer.loopback_holders import make_pack
from torchrelay.transfer.errors import ProtocolViolation
from torchrelay.transfer.manifest import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    PAGE_BYTES,
    Manifest,
    Segment,
    TensorEntry,
    checked_manifest,
    chunk_bytes_for,
    decode_manifest,
    pack_id_of,
)
from torchrelay.transfer.pack_layout import PackLayout


@given(num_bytes=st.integers(0, 50_000), chunk_bytes=st.sampled_from([512, 4096, 16384]))
def test_chunks_cover_pack_exactly(num_bytes: int, chunk_bytes: int) -> None:
    _, manifest = make_pack(num_bytes, chunk_bytes)
    end = 0
    for index in range(manifest.num_chunks):
        span = manifest.chunk_range(index)
        assert span.begin == end < span.end <= span.begin + chunk_bytes
        end = span.end
    assert end == num_bytes


@given(num_bytes=st.integers(1, 40_000), cuts=st.lists(st.integers(0, 40_000), max_size=4))
def test_segment_needs_only_overlapping_chunks(num_bytes: int, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, num_bytes) for cut in cuts), num_bytes]
    segments = tuple(Segment(begin, end) for begin, end in itertools.pairwise(places))
    _, manifest = make_pack(num_bytes)
    manifest = replace(manifest, segments=segments)
    for number, segment in enumerate(segments):
        overlapping = [
            index
            for index in range(manifest.num_chunks)
            if manifest.chunk_range(index).begin < segment.end and segment.begin < manifest.chunk_range(index).end
        ]
        assert list(manifest.chunks_of(number)) == (overlapping if segment.begin < segment.end else [])


@given(pack_bytes=st.integers(1, 1 << 40))
def test_chunk_size_is_whole_pages_within_bounds(pack_bytes: int) -> None:
    size = chunk_bytes_for(pack_bytes)
    assert size % PAGE_BYTES == 0
    assert MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES


def test_pack_id_independent_of_config_order() -> None:
    _, manifest = make_pack(10_000)
    sorted_keys = replace(manifest, config={"a": 1, "b": [1, {"x": 0.5, "y": None}]})
    other = replace(manifest, config={"b": [1, {"y": None, "x": 0.5}], "a": 1})
    assert sorted_keys.encode() == other.encode()
    assert pack_id_of(sorted_keys.encode()) == pack_id_of(other.encode()) != pack_id_of(manifest.encode())


@given(num_bytes=st.integers(0, 30_000), seed=st.integers(0, 5))
def test_encoding_goes_both_ways(num_bytes: int, seed: int) -> None:
    _, manifest = make_pack(num_bytes, seed=seed)
    assert decode_manifest(manifest.encode()) == manifest
    assert decode_manifest(manifest.encode()).encode() == manifest.encode()
    assert isinstance(decode_manifest(manifest.encode()), Manifest)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes must be positive"),
        ({"num_bytes": -1}, "num_bytes non-negative"),
        ({"num_bytes": 9000}, "2 digests for 9000 bytes"),
        ({"chunk_digests": (b"short", b"short")}, "32 bytes each"),
    ],
)
def test_inconsistent_peer_manifest_refused(changes: dict[str, Any], reason: str) -> None:
    _, manifest = make_pack(8000)
    assert checked_manifest(manifest.encode()) == manifest
    with pytest.raises(ProtocolViolation, match=reason):
        checked_manifest(replace(manifest, **changes).encode())


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    group: str
    dtype: str = ""


def test_segments_begin_at_pages_and_groups_at_64_bytes() -> None:
    segments = [
        [Weight("embed", (3, 5), "embed")],
        [Weight("q", (2, 4), "qkv"), Weight("k", (4,), "qkv"), Weight("o", (7,), "out")],
        [Weight("int8", (3, 3), "int8", "I8"), Weight("scale", (3, 1), "scale", "F32")],
    ]
    layout = PackLayout.of(segments, "BF16")
    assert layout.tensors == (
        TensorEntry("embed", (3, 5), "BF16", 0, 30),
        TensorEntry("q", (2, 4), "BF16", 4096, 16),
        TensorEntry("k", (4,), "BF16", 4112, 8),
        TensorEntry("o", (7,), "BF16", 4160, 14),
        TensorEntry("int8", (3, 3), "I8", 8192, 9),
        TensorEntry("scale", (3, 1), "F32", 8256, 12),
    )
    assert layout.segments == (Segment(0, 30), Segment(4096, 4174), Segment(8192, 8268))
    assert layout.num_bytes == 12288

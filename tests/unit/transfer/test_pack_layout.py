from __future__ import annotations

from dataclasses import dataclass

from torchrelay.transfer.manifest import Segment, TensorEntry
from torchrelay.transfer.pack_layout import PackLayout


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

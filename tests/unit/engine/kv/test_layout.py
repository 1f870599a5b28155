from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import DataCorrupted
from torchrelay.engine.core import Finish, NewToken
from torchrelay.engine.kv.layout import KvLayout, KvSequence, KvShape
from torchrelay.modelspec.config import read_config

SHAPES = st.builds(KvShape, st.integers(1, 5), st.integers(1, 3), st.sampled_from([2, 8]), st.sampled_from([2, 4]))


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    sequences = tuple(KvSequence((2 * i, 2 * i + 1), length) for i, length in enumerate(lengths))
    return KvLayout(draw(SHAPES), draw(st.integers(1, 40)), sequences, draw(st.integers(0, 9)) * 4)


@given(layouts())
def test_chunks_cover_every_layer_and_position_once(layout: KvLayout) -> None:
    seen = []
    for index in range(layout.num_kv_chunks):
        place = layout.locate(index)
        assert layout.index_of(place.sequence, place.block, place.layer) == index
        tokens = range(place.token_begin, place.token_end)
        is_hidden = place.layer == layout.shape.num_layers
        row_bytes = layout.hidden_bytes if is_hidden else layout.shape.bytes_per_token_layer
        assert layout.chunk_bytes(index) == len(tokens) * row_bytes and layout.holds_hidden(place) == is_hidden
        seen += [(place.sequence, place.layer, token) for token in tokens]
    everything = {
        (number, layer, token)
        for number, sequence in enumerate(layout.sequences)
        for layer in range(layout.shape.num_layers + (layout.hidden_bytes > 0))
        for token in range(sequence.num_context_tokens)
    }
    assert len(seen) == len(everything)
    assert set(seen) == everything
    num_tokens = sum(sequence.num_context_tokens for sequence in layout.sequences)
    last_bytes = num_tokens * layout.hidden_bytes or layout.chunk_bytes(layout.trailer_index)
    assert sum(layout.chunk_sizes) == layout.num_kv_bytes + last_bytes
    with pytest.raises(IndexError):
        layout.locate(layout.trailer_index)


@given(layouts(), st.sampled_from([1, 1 << 10, 1 << 30]))
def test_pieces_and_ranges_of_layers_keep_to_their_size(layout: KvLayout, max_bytes: int) -> None:
    pieces, ranges = list(layout.pieces(max_bytes)), list(layout.layer_ranges(max_bytes))
    assert [index for piece in pieces for index in piece] == list(range(layout.num_chunks))
    assert all(len(piece) == 1 or sum(map(layout.chunk_bytes, piece)) <= max_bytes for piece in pieces)
    assert [layer for layers in ranges for layer in layers] == list(range(layout.shape.num_layers))
    layer_bytes = layout.num_kv_bytes // layout.shape.num_layers
    assert all(len(layers) == 1 or len(layers) * layer_bytes <= max_bytes for layers in ranges)


def test_trailer_carries_first_tokens() -> None:
    layout = KvLayout(KvShape(1, 1, 2, 4), 16, (KvSequence((0, 2), 5), KvSequence((1,), 9)))
    tokens = (NewToken("r/1", 0, 0, 7), NewToken("r/1", 2, 0, 128_000, Finish.STOP), NewToken("r/1", 1, 4, 3))
    data = layout.pack_trailer(tokens[::-1])
    assert len(data) == layout.chunk_sizes[-1]
    assert layout.unpack_trailer("r/1", memoryview(data)) == tokens
    with pytest.raises(KeyError):
        layout.pack_trailer(tokens[:2])


@pytest.mark.parametrize("damage", [b"", b"\x09" + bytes(47), bytes(12) + b"\x07" + bytes(35), bytes(60)])
def test_mismatched_trailer_is_refused(damage: bytes) -> None:
    layout = KvLayout(KvShape(1, 1, 2, 4), 16, (KvSequence((0, 2), 5), KvSequence((1,), 9)))
    with pytest.raises(DataCorrupted):
        layout.unpack_trailer("r/1", damage)


def test_bytes_per_token_of_model() -> None:
    numbers = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_key_value_heads": 2,
            "vocab_size": 10,
            "max_position_embeddings": 100,
            **numbers,
        }
    )
    assert KvShape.of(config, "BF16").bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert KvShape.of(config, "F32").bytes_per_token == 2 * KvShape.of(config, "F16").bytes_per_token

"""The wire layout of one group's KV, from a prefill worker to a decode or another prefill worker. Imports no torch.

A KV buffer is a list of chunks: for each sequence, for each block of ``block_tokens`` positions, one chunk per layer;
then one *trailer* with the first tokens. A chunk is contiguous ``[2 (keys, values), tokens, kv_heads, head_dim]`` in
the model's dtype; the last block of a sequence may be shorter. Both sides derive the layout from the offer, so it is
never sent.

A prompt that moves between prefill workers has the layers below its boundary only. After them, each block has one chunk
with the hidden states, ``[tokens, hidden]``, and there is no trailer. At boundary 0 there is no chunk at all.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchrelay.common.errors import DataCorrupted
from torchrelay.engine.core import Finish, GroupSpec, NewToken
from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.opaque import OpaqueModel
from torchrelay.modelspec.tensor_order import DTYPE_BYTES

_TRAILER = struct.Struct("<IIII")  # choice, position, token id, finish
_FINISHES = (None, Finish.STOP, Finish.LENGTH, Finish.CANCELLED)


@dataclass(frozen=True, slots=True)
class KvShape:
    """The sizes that determine the shape of a model's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @classmethod
    def of(cls, config: ModelConfig | OpaqueModel, dtype: str) -> KvShape:
        """The shape for a pack whose dtype, which is also the KV's, is "F32", "BF16" or "F16"."""
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, DTYPE_BYTES[dtype])

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of the keys and values of one position in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.bytes_per_token_layer


@dataclass(frozen=True, slots=True)
class KvSequence:
    """A context that is handed over, shared by ``choices``, without the first new token."""

    choices: tuple[int, ...]
    num_context_tokens: int


@dataclass(frozen=True, slots=True)
class KvLocation:
    """The positions [token_begin, token_end) of one chunk."""

    sequence: int
    block: int
    layer: int
    token_begin: int
    token_end: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The chunks of one KV buffer, in the order of computation if no prefill chunk exceeds a block."""

    shape: KvShape
    block_tokens: int
    sequences: tuple[KvSequence, ...]
    hidden_bytes: int = 0  # of one position's hidden states; 0: a hand-over, without hidden states

    @classmethod
    def of(cls, shape: KvShape, block_tokens: int, group: GroupSpec) -> KvLayout:
        contexts = group.contexts()
        sequences = tuple(KvSequence(choices, group.num_prompt_tokens + len(forced)) for choices, forced in contexts)
        return cls(shape, block_tokens, sequences)

    @classmethod
    def of_move(cls, shape: KvShape, block_tokens: int, group: GroupSpec, boundary: int, hidden_size: int) -> KvLayout:
        """The layout of a prompt that has computed the layers below ``boundary``, which are those of its shape."""
        layout = cls.of(replace(shape, num_layers=boundary), block_tokens, group)
        return replace(layout, hidden_bytes=hidden_size * shape.dtype_bytes if boundary else 0)

    @property
    def num_planes(self) -> int:
        """Chunks of one block: a plane per layer, and one for the hidden states if there are any."""
        return self.shape.num_layers + bool(self.hidden_bytes)

    def num_blocks(self, sequence: int) -> int:
        return -(-self.sequences[sequence].num_context_tokens // self.block_tokens)

    @property
    def num_kv_chunks(self) -> int:
        return sum(self.num_blocks(i) for i in range(len(self.sequences))) * self.num_planes

    @property
    def num_chunks(self) -> int:
        has_trailer = self.shape.num_layers and not self.hidden_bytes
        return self.num_kv_chunks + bool(has_trailer)

    @property
    def trailer_index(self) -> int:
        return self.num_kv_chunks

    @property
    def chunk_sizes(self) -> list[int]:
        return [self.chunk_bytes(index) for index in range(self.num_chunks)]

    def pieces(self, max_bytes: int) -> Iterator[range]:
        """Ranges of chunks of at most ``max_bytes`` in total, or of one larger chunk."""
        begin = num_bytes = 0
        for index, chunk_bytes in enumerate(self.chunk_sizes):
            if index > begin and num_bytes + chunk_bytes > max_bytes:
                yield range(begin, index)
                begin, num_bytes = index, 0
            num_bytes += chunk_bytes
        if self.num_chunks:
            yield range(begin, self.num_chunks)

    def layer_ranges(self, max_bytes: int) -> Iterator[range]:
        """The layers, in ranges with at most ``max_bytes`` of KV, or of one larger layer."""
        num_layers = self.shape.num_layers
        num_at_once = max(1, max_bytes * num_layers // max(self.num_kv_bytes, 1))
        for begin in range(0, num_layers, num_at_once):
            yield range(begin, min(begin + num_at_once, num_layers))

    @property
    def num_kv_bytes(self) -> int:
        """Bytes of KV, without the trailer."""
        return sum(sequence.num_context_tokens for sequence in self.sequences) * self.shape.bytes_per_token

    def chunk_bytes(self, index: int) -> int:
        if index == self.trailer_index:
            return _TRAILER.size * sum(len(sequence.choices) for sequence in self.sequences)
        place = self.locate(index)
        row_bytes = self.hidden_bytes if self.holds_hidden(place) else self.shape.bytes_per_token_layer
        return (place.token_end - place.token_begin) * row_bytes

    def holds_hidden(self, place: KvLocation) -> bool:
        return place.layer == self.shape.num_layers

    def index_of(self, sequence: int, block: int, layer: int) -> int:
        earlier = sum(self.num_blocks(i) for i in range(sequence))
        return (earlier + block) * self.num_planes + layer

    def locate(self, index: int) -> KvLocation:
        """The location of a chunk of KV or hidden states. Raises ``IndexError`` for the trailer and beyond."""
        block, layer = divmod(index, self.num_planes)
        for number, sequence in enumerate(self.sequences):
            num_blocks = self.num_blocks(number)
            if 0 <= block < num_blocks:
                begin = block * self.block_tokens
                end = min(begin + self.block_tokens, sequence.num_context_tokens)
                return KvLocation(number, block, layer, begin, end)
            block -= num_blocks
        raise IndexError(f"chunk {index} is not among the {self.num_kv_chunks} KV chunks")

    def pack_trailer(self, first_tokens: Sequence[NewToken]) -> bytes:
        """The last chunk: the first new token of each choice, in order. Raises ``KeyError`` if one is missing."""
        by_choice = {token.choice: token for token in first_tokens}
        ordered = [by_choice[choice] for sequence in self.sequences for choice in sequence.choices]
        return b"".join(
            _TRAILER.pack(token.choice, token.position, token.token_id, _FINISHES.index(token.finish))
            for token in ordered
        )

    def unpack_trailer(self, group_id: str, data: bytes | memoryview) -> tuple[NewToken, ...]:
        """The first tokens of a group. Raises ``DataCorrupted`` if they do not match the layout."""
        choices = [choice for sequence in self.sequences for choice in sequence.choices]
        if len(data) != _TRAILER.size * len(choices):
            raise DataCorrupted(f"the trailer of {group_id} has {len(data)} bytes, not {_TRAILER.size * len(choices)}")
        rows = list(_TRAILER.iter_unpack(data))
        if [row[0] for row in rows] != choices or any(row[3] >= len(_FINISHES) for row in rows):
            raise DataCorrupted(f"the trailer of {group_id} does not match the choices {choices}")
        return tuple(NewToken(group_id, choice, place, token, _FINISHES[end]) for choice, place, token, end in rows)


def context_digests(group: GroupSpec) -> tuple[bytes, ...]:
    """A digest of the tokens of each context."""
    contexts = [(*group.prompt, *forced) for _, forced in group.contexts()]
    return tuple(hashlib.sha256(array("q", tokens).tobytes()).digest() for tokens in contexts)

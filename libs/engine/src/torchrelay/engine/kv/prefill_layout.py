"""The wire layout of a prompt that moves between instances at a layer boundary. Imports no torch.

The exporter computed layers [0, boundary) of all its positions; the importer computes the rest. The chunks are: for
each context, for each block of ``block_tokens`` positions, the KV of each layer below the boundary as in a
``KvLayout``, then the hidden states, ``[tokens, hidden]``. At boundary 0 nothing was computed and nothing is sent.

If the KV is handed over to a decode worker, the importer hands over all layers: the exporter's hand-over ends with the
export.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchrelay.engine.core import GroupSpec
from torchrelay.engine.kv.layout import KvLayout, KvLocation, KvSequence, KvShape


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """The chunks of one export. Both sides derive them from the model, the group and the boundary."""

    shape: KvShape
    hidden_bytes: int  # of one position
    boundary: int
    block_tokens: int
    sequences: tuple[KvSequence, ...]

    @classmethod
    def of(cls, shape: KvShape, hidden_size: int, boundary: int, block_tokens: int, group: GroupSpec) -> PrefillLayout:
        sequences = KvLayout.of(shape, block_tokens, group).sequences
        return cls(shape, hidden_size * shape.dtype_bytes, boundary, block_tokens, sequences)

    @property
    def num_planes(self) -> int:
        """Chunks of one block: a plane per layer of KV, and one for the hidden states."""
        return self.boundary + 1 if self.boundary else 0

    @property
    def num_chunks(self) -> int:
        return self._grid.num_kv_chunks if self.num_planes else 0

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
        """The layers below the boundary, in ranges with at most ``max_bytes`` of KV, or of one larger layer."""
        num_tokens = sum(sequence.num_context_tokens for sequence in self.sequences)
        num_layers = max(1, max_bytes // (num_tokens * self.shape.bytes_per_token_layer))
        for begin in range(0, self.boundary, num_layers):
            yield range(begin, min(begin + num_layers, self.boundary))

    def chunk_bytes(self, index: int) -> int:
        place = self.locate(index)
        row_bytes = self.hidden_bytes if self.holds_hidden(place) else self.shape.bytes_per_token_layer
        return (place.token_end - place.token_begin) * row_bytes

    def locate(self, index: int) -> KvLocation:
        """The location of a chunk; its ``layer`` is the plane. Raises ``IndexError``."""
        if not 0 <= index < self.num_chunks:
            raise IndexError(f"chunk {index} is not among the {self.num_chunks} chunks")
        return self._grid.locate(index)

    def holds_hidden(self, place: KvLocation) -> bool:
        return place.layer == self.num_planes - 1

    @property
    def _grid(self) -> KvLayout:
        """The same chunks in the same order, with the hidden states as one more layer of KV."""
        return KvLayout(replace(self.shape, num_layers=self.num_planes), self.block_tokens, self.sequences)


def context_digests(group: GroupSpec) -> tuple[bytes, ...]:
    """A digest of the tokens of each context."""
    contexts = [(*group.prompt, *forced) for _, forced in group.contexts()]
    return tuple(hashlib.sha256(array("q", tokens).tobytes()).digest() for tokens in contexts)

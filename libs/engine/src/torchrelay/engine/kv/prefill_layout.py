"""The wire layout of a prompt that moves between instances at a layer boundary. Imports no torch.

The exporter computed layers [0, boundary) of all its positions; the importer computes the rest. The chunks are: for
each context, for each block of ``block_tokens`` positions, the KV of each layer below the boundary as in a
``KvLayout``, then the hidden states, ``[tokens, hidden]``. At boundary 0 nothing was computed and nothing is sent.

If the KV is handed over to a decode worker, the importer hands over all layers: the exporter's hand-over ends with the
export.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class PrefillExport:
    """A prompt that has left an instance. ``spec`` has the remaining choices, with their output as forced output, and
    no deadline, because the importer's clock differs.
    """

    spec: GroupSpec
    left_s: float | None  # to its deadline, at the time of export
    layout: PrefillLayout
    chunks: tuple[memoryview, ...]  # as in the layout

    def group_at(self, now_s: float) -> GroupSpec:
        """The group with its deadline by the importer's clock, which shows ``now_s``."""
        return self.spec if self.left_s is None else replace(self.spec, deadline_s=now_s + self.left_s)

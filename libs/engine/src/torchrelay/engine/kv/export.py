"""KV and hidden states copied out of the pool, for a decode worker or for another instance that continues a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor

from torchrelay.common.errors import Conflict
from torchrelay.engine import profile
from torchrelay.engine.batching.sequences import PrefillChunk, PrefillContext, SequenceGroup
from torchrelay.engine.buffers import as_bytes
from torchrelay.engine.core import GroupSpec, KvBlock
from torchrelay.engine.kv.hidden_states import HiddenStates
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.engine.kv.pool import PagedKv
from torchrelay.engine.profile import Activity

# KV leaves in portions of at least this size: each portion wakes threads of both workers, which on a CPU slow down the
# computing threads. With 128 KB of KV per layer, prefill took 210 ms with portions of one layer and 189 ms with six.
MIN_HANDOVER_BYTES: Final = 1 << 20


class KvExport:
    """Copies computed KV and hidden states. ``kv_layout`` returns the layout of a group's hand-over."""

    def __init__(
        self,
        pages: PagedKv,
        hidden_states: HiddenStates,
        kv_layout: Callable[[GroupSpec], KvLayout],
        min_handover_bytes: int = MIN_HANDOVER_BYTES,
    ) -> None:
        self._pages, self._kv = pages, pages.kv
        self._hidden_states = hidden_states
        self._kv_layout = kv_layout
        self._min_handover_bytes = min_handover_bytes
        self._token_bytes = pages.kv[0, :, 0].nbytes  # of one layer

    def layers_at_once(self, chunks: Sequence[PrefillChunk]) -> int:
        """Layers of these chunks to compute before a hand-over, which overlaps with the next layers."""
        layer_bytes = sum(chunk.end - chunk.new_from for chunk in chunks) * self._token_bytes
        return max(1, self._min_handover_bytes // layer_bytes) if layer_bytes else len(self._kv)

    def hand_over(self, chunks: Sequence[PrefillChunk], layers: Sequence[int]) -> None:
        """Passes the finished blocks of computed chunks to ``on_kv`` of their groups, in part by ``finish``."""
        if not chunks:
            return
        before = profile.enter(Activity.KV_TRANSFER)
        for layer, chunk in product(layers, chunks):
            self._hand_over_chunk(chunk, layer)
        profile.enter(before)

    def finish(self) -> None:
        """Passes on the blocks of earlier calls that are still being copied, each once the device has computed it."""
        self._pages.downloads.finish()

    def copy_hidden(self, context: PrefillContext, begin: int, end: int) -> memoryview:
        """The hidden states of positions [begin, end)."""
        return as_bytes(self._hidden_states.of(context)[begin:end])

    def copy_kv(self, layer: int, context: PrefillContext, begin: int, end: int) -> memoryview:
        """The KV of positions [begin, end) of one layer, as a chunk of the layout."""
        return as_bytes(self._gathered(layer, context, begin, end))

    def _gathered(self, layer: int, context: PrefillContext, begin: int, end: int) -> Tensor:
        slots = torch.from_numpy(context.slots[begin:end]).to(self._kv.device)
        return self._kv[layer].index_select(1, slots)

    def _hand_over_chunk(self, chunk: PrefillChunk, layer: int) -> None:
        context, group = chunk.context, chunk.context.group
        assert group.on_kv is not None, "a chunk of a group without on_kv is not handed over"
        layout = self._kv_layout(group.spec)
        for block in range(chunk.new_from // layout.block_tokens, layout.num_blocks(context.sequence)):
            index = layout.index_of(context.sequence, block, layer)
            place = layout.locate(index)
            if place.token_end > chunk.end:
                break
            if index in group.handed_over:  # before a preemption
                continue
            group.handed_over.add(index)
            gathered = self._gathered(layer, context, place.token_begin, place.token_end)
            self._pages.downloads.download(gathered, partial(_deliver, group.on_kv, group.spec.group_id, index))


def _deliver(on_kv: Callable[[KvBlock], None], group_id: str, index: int, data: memoryview) -> None:
    before = profile.enter(Activity.KV_TRANSFER)
    on_kv(KvBlock(group_id, index, data))
    profile.enter(before)


class PrefillExport:
    """A prompt that leaves its instance at a layer boundary. It keeps its pages until it is cancelled.

    All methods run on the engine thread.
    """

    def __init__(self, group: SequenceGroup, spec: GroupSpec, layout: KvLayout, export: KvExport) -> None:
        """``spec`` has the remaining choices, with their output as forced output."""
        self.spec, self.layout = spec, layout
        self._contexts = tuple(group.contexts)
        self._export = export

    @torch.inference_mode()
    def read(self, index: int) -> memoryview:
        """The bytes of a chunk. Raises ``Conflict`` if its context has ended."""
        place = self.layout.locate(index)
        context = self._contexts[place.sequence]
        if not context.is_live:
            raise Conflict(f"{self.spec.group_id} has ended")
        if self.layout.holds_hidden(place):
            return self._export.copy_hidden(context, place.token_begin, place.token_end)
        return self._export.copy_kv(place.layer, context, place.token_begin, place.token_end)

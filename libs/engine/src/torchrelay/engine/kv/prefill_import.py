"""Import of prompts that another instance computed up to a layer boundary."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import PrefillChunk, SequenceGroup
from torchrelay.engine.batching.validation import check_layer_boundary
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.kv.export import KvExport
from torchrelay.engine.kv.hidden_states import HiddenStates
from torchrelay.engine.kv.kv_import import PageImport
from torchrelay.engine.kv.pool import PagedKv
from torchrelay.engine.kv.prefill_layout import PrefillLayout


class PrefillImport(PageImport):
    """A prompt that waits for pages like any other, and is then filled with another instance's export, in chunks:

    pages --receive--> chunks missing --write--> complete --start--> continues from its boundary
      '--------start_over------'-----------------------------------> continues from its beginning
    """

    layout: PrefillLayout

    def __init__(
        self,
        group: SequenceGroup,
        layout_of: Callable[[int, int], PrefillLayout],
        pages: PagedKv,
        hidden_states: HiddenStates,
        scheduler: BatchScheduler,
        export: KvExport,
    ) -> None:
        """Queues the prompt. ``layout_of`` takes the boundary and the block size. Raises ``InvalidRequest`` or
        ``Conflict``.
        """
        super().__init__(group, pages, scheduler)
        self._layout_of, self._hidden_states, self._export = layout_of, hidden_states, export
        scheduler.submit(group)

    def receive(self, boundary: int, block_tokens: int) -> PrefillLayout:
        """Prepares for the chunks of an export; returns their layout. Raises ``InvalidRequest``."""
        if block_tokens < 1:
            raise InvalidRequest("an export must name its block_tokens", field="block_tokens")
        self.layout = self._layout_of(boundary, block_tokens)
        check_layer_boundary(self.layout.shape.num_layers, boundary)
        self._missing = set(range(self.layout.num_chunks))
        return self.layout

    @torch.inference_mode()
    def write(self, index: int, data: memoryview | bytes) -> None:
        """Copies one chunk to its place, unless cancelled. Raises ``DataCorrupted`` if the length is wrong."""
        place, context = self._locate(index, data)
        if not context.is_live:
            return
        kv = self._pages.kv
        block = as_tensor(memoryview(data)).view(kv.dtype)
        if self.layout.holds_hidden(place):
            rows = block.view(place.token_end - place.token_begin, -1)
            self._hidden_states.write(context, place.token_begin, rows.to(kv.device))
            return
        # NOTE: cached positions are in pages that other sequences read: they must not be written.
        skipped = min(max(context.num_cached - place.token_begin, 0), place.token_end - place.token_begin)
        block = block.view(2, -1, *kv.shape[3:])[:, skipped:].to(kv.device)
        slots = torch.from_numpy(context.slots[place.token_begin + skipped : place.token_end]).to(kv.device)
        kv[place.layer].index_copy_(1, slots, block)

    def hand_over(self, layers: range) -> None:
        """Hands over the KV of imported layers, once, if the prompt's KV is handed over."""
        if self.imported.on_kv is not None:
            chunks = [PrefillChunk(context, 0, context.num_tokens) for context in self.imported.contexts]
            self._export.hand_over(chunks, layers)

    def start(self) -> None:
        """Hands over the rest of the imported KV and continues the prompt from its boundary, unless it was cancelled.

        Raises ``Conflict`` while chunks are missing.
        """
        self._check_complete()
        self.imported.layer = self.layout.boundary
        self.hand_over(range(self.layout.boundary))
        self._run()

    def start_over(self) -> None:
        """Computes the prompt from its beginning, in the pages that it has, unless it was cancelled."""
        for context in self.imported.contexts:
            self._hidden_states.drop(context)
        self._run()

    def _run(self) -> None:
        if self.imported.contexts:
            self._scheduler.run(self.imported)

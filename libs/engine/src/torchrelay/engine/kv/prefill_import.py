"""Import of prompts that another instance computed up to a layer boundary."""

from __future__ import annotations

import torch

from torchrelay.common.errors import Conflict, DataCorrupted
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.kv.hidden_states import HiddenStates
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.engine.kv.pool import PagedKv
from torchrelay.engine.kv.prefill_layout import PrefillLayout


class PrefillImport:
    """Pages reserved for a prompt, to be filled with its export. All methods on the engine thread."""

    def __init__(
        self,
        group: SequenceGroup,
        layout: PrefillLayout,
        kv_layout: KvLayout,
        pages: PagedKv,
        hidden_states: HiddenStates,
        scheduler: BatchScheduler,
    ) -> None:
        """Reserves at once. Raises ``KvPoolFull``, ``InvalidRequest`` or ``Conflict``."""
        self.layout = layout
        self._group = group
        self._pages, self._hidden_states = pages, hidden_states
        self._scheduler = scheduler
        self._contexts = tuple(group.contexts)
        self._missing = set(range(layout.num_chunks))
        group.layer = layout.boundary
        group.has_all_kv = layout.with_kv or not layout.boundary
        if group.on_kv is not None:  # the exporter handed over the layers below
            indices = range(kv_layout.num_kv_chunks)
            group.handed_over = {index for index in indices if kv_layout.locate(index).layer < layout.boundary}
        scheduler.receive(group)

    @property
    def num_missing(self) -> int:
        """Chunks not written yet."""
        return len(self._missing)

    @torch.inference_mode()
    def write(self, index: int, data: memoryview | bytes) -> None:
        """Copies one chunk to its place, in any order.

        Ignored after the group was cancelled. Raises ``DataCorrupted`` if the length is wrong.
        """
        if len(data) != self.layout.chunk_bytes(index):
            name, expected = self._group.spec.group_id, self.layout.chunk_bytes(index)
            raise DataCorrupted(f"chunk {index} of {name} has {len(data)} bytes, not {expected}")
        place = self.layout.locate(index)
        self._missing.discard(index)
        context = self._contexts[place.sequence]
        if not context.is_live:
            return
        kv = self._pages.kv
        block = as_tensor(memoryview(data)).view(kv.dtype)
        if self.layout.holds_hidden(place):
            rows = block.view(place.token_end - place.token_begin, -1)
            self._hidden_states.write(context, place.token_begin, rows.to(kv.device))
            return
        # NOTE: cached positions are in pages that others read: they must not be written.
        skipped = min(max(context.num_cached - place.token_begin, 0), place.token_end - place.token_begin)
        block = block.view(2, -1, *kv.shape[3:])[:, skipped:].to(kv.device)
        slots = torch.from_numpy(context.slots[place.token_begin + skipped : place.token_end]).to(kv.device)
        kv[place.layer].index_copy_(1, slots, block)

    def start(self) -> None:
        """Continues the prompt from its boundary. Raises ``Conflict`` while chunks are missing."""
        if not self._group.contexts:  # it was cancelled
            return
        if self._missing:
            raise Conflict(f"{len(self._missing)} chunks of {self._group.spec.group_id} are missing")
        self._scheduler.run(self._group)

    def drop(self) -> None:
        """The missing chunks will not arrive: frees the pages. Only before ``start``."""
        for context in tuple(self._group.contexts):
            self._scheduler.drop(context)

"""Import of prompts that another instance computed up to a layer boundary."""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import PrefillChunk, SequenceGroup
from torchrelay.engine.kv.export import KvExport
from torchrelay.engine.kv.hidden_states import HiddenStates
from torchrelay.engine.kv.kv_import import PageImport
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.engine.kv.pool import PagedKv


class PrefillImport(PageImport):
    """A prompt that waits for pages like any other, and is then filled with another instance's export, in chunks:

    pages --receive--> chunks missing --write--> complete --start--> continues from its boundary
      '--------start_over------'-----------------------------------> continues from its beginning
    """

    def __init__(
        self,
        group: SequenceGroup,
        layout_of: Callable[[int, int], KvLayout],
        pages: PagedKv,
        hidden_states: HiddenStates,
        scheduler: BatchScheduler,
        export: KvExport,
    ) -> None:
        """Queues the prompt. ``layout_of`` takes the boundary and the block size. Raises ``InvalidRequest`` or
        ``Conflict``.
        """
        super().__init__(group, pages, hidden_states, scheduler)
        self._layout_of, self._export = layout_of, export
        scheduler.submit(group)

    def receive(self, boundary: int, block_tokens: int) -> KvLayout:
        """Prepares for the chunks of an export; returns their layout. Raises ``InvalidRequest``."""
        if block_tokens < 1:
            raise InvalidRequest("an export must name its block_tokens", field="block_tokens")
        if not 0 <= boundary <= (num_layers := len(self._pages.kv)):
            raise InvalidRequest(f"layer boundary {boundary} must be between 0 and {num_layers}", field="boundary")
        self.layout = self._layout_of(boundary, block_tokens)
        self._missing = set(range(self.layout.num_chunks))
        return self.layout

    def hand_over(self, layers: range) -> None:
        """Hands over the KV of imported layers, once, if the prompt's KV is handed over."""
        if self.imported.on_kv is not None:
            chunks = [PrefillChunk(context, 0, context.num_tokens) for context in self.imported.contexts]
            self._export.hand_over(chunks, layers)
            self._export.finish()

    def start(self) -> None:
        """Hands over the rest of the imported KV and continues the prompt from its boundary, unless it was cancelled.

        Raises ``Conflict`` while chunks are missing.
        """
        self._check_complete()
        self.imported.layer = self.layout.shape.num_layers
        self.hand_over(range(self.imported.layer))
        self._run()

    def start_over(self) -> None:
        """Computes the prompt from its beginning, in the pages that it has, unless it was cancelled."""
        for context in self.imported.contexts:
            self._hidden_states.drop(context)
        self._run()

    def _run(self) -> None:
        if self.imported.contexts:
            self._scheduler.run(self.imported)

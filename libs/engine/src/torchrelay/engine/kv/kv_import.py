"""Imports of another worker's results, and the import of a group's KV to decode from."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.engine import profile
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.core import GroupSpec, grammar_state
from torchrelay.engine.kernels.cpu.threads import one_thread
from torchrelay.engine.kv.hidden_states import HiddenStates
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.engine.kv.pool import PagedKv
from torchrelay.engine.profile import Activity


class PageImport:
    """Pages of a group, to be filled with received chunks in any order.

    All methods run on the engine thread.
    """

    layout: KvLayout

    def __init__(
        self, imported: SequenceGroup, pages: PagedKv, hidden_states: HiddenStates, scheduler: BatchScheduler
    ) -> None:
        self.imported = imported
        self._pages, self._hidden_states = pages, hidden_states
        self._scheduler = scheduler
        self._contexts = tuple(imported.contexts)
        self._missing: set[int] = set()

    @property
    def num_missing(self) -> int:
        """Chunks not written yet."""
        return len(self._missing)

    @torch.inference_mode()
    def write(self, index: int, data: memoryview | bytes) -> None:
        """Copies one chunk (not the trailer) to its place, unless cancelled. Raises ``DataCorrupted`` if the length is
        wrong.
        """
        name, expected = self.imported.spec.group_id, self.layout.chunk_bytes(index)
        if len(data) != expected:
            raise DataCorrupted(f"KV chunk {index} of {name} has {len(data)} bytes, not {expected}")
        place = self.layout.locate(index)
        self._missing.discard(index)
        context = self._contexts[place.sequence]
        if not context.is_live:
            return
        kv = self._pages.kv
        before = profile.enter(Activity.KV_TRANSFER)
        with one_thread():
            block = self._pages.uploads.upload(memoryview(data)).view(kv.dtype)
            if self.layout.holds_hidden(place):
                rows = block.view(place.token_end - place.token_begin, -1)
                self._hidden_states.write(context, place.token_begin, rows)
            else:
                # NOTE: cached positions are in pages that other sequences read: they must not be written.
                begin = min(max(context.num_cached, place.token_begin), place.token_end)
                block = block.view(2, -1, *kv.shape[3:])[:, begin - place.token_begin :]
                slots = torch.from_numpy(context.slots[begin : place.token_end]).to(kv.device)
                kv[place.layer].index_copy_(1, slots, block)
        profile.enter(before)

    def _check_complete(self) -> None:
        """Raises ``Conflict`` while chunks are missing, unless the group was cancelled."""
        if self._missing and self.imported.contexts:
            raise Conflict(f"{len(self._missing)} KV chunks of {self.imported.spec.group_id} are missing")


class KvImport(PageImport):
    """The import of a group's KV, in chunks."""

    def __init__(
        self,
        group: GroupSpec,
        layout: KvLayout,
        pages: PagedKv,
        hidden_states: HiddenStates,
        scheduler: BatchScheduler,
        vocab_size: int,
    ) -> None:
        """Reserves the pages. Raises ``KvPoolFull``, ``InvalidRequest`` or ``Conflict``."""
        super().__init__(SequenceGroup.of(group), pages, hidden_states, scheduler)
        self.group, self.layout, self._vocab_size = group, layout, vocab_size
        self._missing = set(range(layout.num_kv_chunks))
        scheduler.receive(self.imported)

    def start(self, first_tokens: Mapping[int, int]) -> None:
        """Starts decoding. Choices without a first token, or whose first token ends them, free their pages.

        Does nothing if the group was cancelled. Raises ``Conflict`` while chunks are missing.
        """
        self._check_complete()
        if any(not 0 <= token < self._vocab_size for token in first_tokens.values()):
            raise InvalidRequest(f"first tokens must be between 0 and {self._vocab_size - 1}")
        sampling = self.group.sampling
        for context in tuple(self.imported.contexts):
            position, unfinished = len(context.forced), dict[int, int]()
            for choice, token in first_tokens.items():
                if sampling.finish_of(token, position, grammar_state(sampling, (*context.forced, token))) is None:
                    unfinished[choice] = token
            self._scheduler.start(context, unfinished)

    def drop(self) -> None:
        """Frees the pages, because the missing chunks will not arrive. A group that decodes already continues."""
        for context in tuple(self.imported.contexts):
            self._scheduler.drop(context, list(context.choices))

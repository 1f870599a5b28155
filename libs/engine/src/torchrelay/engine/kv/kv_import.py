"""Imports of another worker's results, and the import of a group's KV to decode from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.engine import profile
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import PrefillContext, SequenceGroup
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.core import GroupSpec, grammar_state
from torchrelay.engine.kernels.cpu.threads import one_thread
from torchrelay.engine.kv.layout import KvLayout, KvLocation
from torchrelay.engine.kv.pool import PagedKv
from torchrelay.engine.kv.prefill_layout import PrefillLayout
from torchrelay.engine.profile import Activity


class PageImport:
    """Pages of a group, to be filled with received chunks in any order.

    All methods run on the engine thread.
    """

    layout: KvLayout | PrefillLayout
    _chunk: ClassVar[str] = "chunk"  # its name in errors

    def __init__(self, imported: SequenceGroup, pages: PagedKv, scheduler: BatchScheduler) -> None:
        self.imported = imported
        self._pages = pages
        self._scheduler = scheduler
        self._contexts = tuple(imported.contexts)
        self._missing: set[int] = set()

    @property
    def num_missing(self) -> int:
        """Chunks not written yet."""
        return len(self._missing)

    def _locate(self, index: int, data: memoryview | bytes) -> tuple[KvLocation, PrefillContext]:
        """The location of a chunk that arrived, and its context. Raises ``DataCorrupted`` if the length is wrong."""
        name, expected = self.imported.spec.group_id, self.layout.chunk_bytes(index)
        if len(data) != expected:
            raise DataCorrupted(f"{self._chunk} {index} of {name} has {len(data)} bytes, not {expected}")
        place = self.layout.locate(index)
        self._missing.discard(index)
        return place, self._contexts[place.sequence]

    def _check_complete(self) -> None:
        """Raises ``Conflict`` while chunks are missing, unless the group was cancelled."""
        if self._missing and self.imported.contexts:
            raise Conflict(f"{len(self._missing)} {self._chunk}s of {self.imported.spec.group_id} are missing")


class KvImport(PageImport):
    """The import of a group's KV, in chunks."""

    layout: KvLayout
    _chunk = "KV chunk"

    def __init__(
        self, group: GroupSpec, layout: KvLayout, pages: PagedKv, scheduler: BatchScheduler, vocab_size: int
    ) -> None:
        """Reserves the pages. Raises ``KvPoolFull``, ``InvalidRequest`` or ``Conflict``."""
        super().__init__(SequenceGroup.of(group), pages, scheduler)
        self.group, self.layout, self._vocab_size = group, layout, vocab_size
        self._missing = set(range(layout.num_kv_chunks))
        scheduler.receive(self.imported)

    @torch.inference_mode()
    def write(self, index: int, data: memoryview | bytes) -> None:
        """Copies one chunk (not the trailer) into the pages, unless cancelled. Raises ``DataCorrupted``."""
        place, context = self._locate(index, data)
        if not context.is_live:
            return
        kv = self._pages.kv[place.layer]
        block = as_tensor(memoryview(data)).view(kv.dtype).view(2, -1, *kv.shape[2:]).to(kv.device)
        slots = torch.from_numpy(context.slots[place.token_begin : place.token_end]).to(kv.device)
        before = profile.enter(Activity.KV_TRANSFER)
        with one_thread():
            kv.index_copy_(1, slots, block)
        profile.enter(before)

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

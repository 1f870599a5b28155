"""Groups whose KV was computed by another worker."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.engine import profile
from torchrelay.engine.batching.scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.core import GroupSpec
from torchrelay.engine.kernels.cpu.threads import one_thread
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.engine.kv.pool import PagedKv
from torchrelay.engine.profile import Activity


class KvImport:
    """Pages reserved for a group, to be filled with received KV chunks. All methods on the engine thread."""

    def __init__(
        self, group: GroupSpec, layout: KvLayout, pages: PagedKv, scheduler: BatchScheduler, vocab_size: int
    ) -> None:
        """Reserves at once. Raises ``KvPoolFull`` or ``InvalidRequest``."""
        self.group = group
        self.layout = layout
        self._pages = pages
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self.adopted = SequenceGroup.of(group)
        self._contexts = tuple(self.adopted.contexts)
        self._missing = set(range(layout.num_kv_chunks))
        scheduler.receive(self.adopted)

    @property
    def num_missing(self) -> int:
        """KV chunks not written yet."""
        return len(self._missing)

    @torch.inference_mode()
    def write(self, index: int, data: memoryview | bytes) -> None:
        """Puts one received KV chunk (not the trailer) into the pages, in any order; copies it.

        Nothing happens after the group was cancelled. Raises ``DataCorrupted`` when the length is wrong.
        """
        if len(data) != self.layout.chunk_bytes(index):
            raise DataCorrupted(
                f"KV chunk {index} of {self.group.group_id} has {len(data)} bytes, not {self.layout.chunk_bytes(index)}"
            )
        place = self.layout.locate(index)
        self._missing.discard(index)
        context = self._contexts[place.sequence]
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
        """Begins decoding: choice -> its first new token. Choices it ended, or that are not named, free their pages.

        Nothing happens when the group was cancelled. Raises ``Conflict`` while chunks are missing.
        """
        if self._missing and self.adopted.contexts:
            raise Conflict(f"{len(self._missing)} KV chunks of {self.group.group_id} are missing")
        if any(not 0 <= token < self._vocab_size for token in first_tokens.values()):
            raise InvalidRequest("a first token is not in the vocabulary")
        for context in tuple(self.adopted.contexts):
            goes_on = {
                choice: token
                for choice, token in first_tokens.items()
                if self.group.sampling.finish_of(token, context.num_forced) is None
            }
            self._scheduler.start(context, goes_on)

    def drop(self) -> None:
        """The KV will not come: frees the pages. Harmless after ``start``: what decodes already goes on."""
        for context in tuple(self.adopted.contexts):
            self._scheduler.drop(context)

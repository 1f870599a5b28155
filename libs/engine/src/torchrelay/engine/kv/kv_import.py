"""Import of a group's KV from the worker that computed it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.engine import profile
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
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
        self.imported = SequenceGroup.of(group)
        self._contexts = tuple(self.imported.contexts)
        self._missing = set(range(layout.num_kv_chunks))
        scheduler.receive(self.imported)

    @property
    def num_missing(self) -> int:
        """KV chunks not written yet."""
        return len(self._missing)

    @torch.inference_mode()
    def write(self, index: int, data: memoryview | bytes) -> None:
        """Copies one received KV chunk (not the trailer) into the pages, in any order.

        Ignored after the group was cancelled. Raises ``DataCorrupted`` if the length is wrong.
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
        """Starts decoding. Choices without a first token, or that it ends, free their pages.

        Ignored if the group was cancelled. Raises ``Conflict`` while chunks are missing.
        """
        if self._missing and self.imported.contexts:
            raise Conflict(f"{len(self._missing)} KV chunks of {self.group.group_id} are missing")
        if any(not 0 <= token < self._vocab_size for token in first_tokens.values()):
            raise InvalidRequest(f"first tokens must be between 0 and {self._vocab_size - 1}")
        for context in tuple(self.imported.contexts):
            goes_on = {
                choice: token
                for choice, token in first_tokens.items()
                if self.group.sampling.finish_of(token, context.num_forced) is None
            }
            self._scheduler.start(context, goes_on)

    def drop(self) -> None:
        """The KV will not arrive: frees the pages. Harmless after ``start``: what decodes continues."""
        for context in tuple(self.imported.contexts):
            self._scheduler.drop(context)

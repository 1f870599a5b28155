"""Decode steps as CUDA graphs: recorded once per batch size, then replayed with one launch.

A step of a few rows is hundreds of kernels of microseconds each, less than it takes to launch them. A recording keeps
the addresses that it was made with, so a batch is copied into a *fixed* batch of the next larger size. The unused rows
compute with an old token and write to a scratch slot, which no other row reads.

    eager --all layers loaded, and nothing to compute, or a first batch of that size--> recorded --> replayed
      '--no memory for it, or a failure--> eager for good
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.batching.sequences import BatchPlan
from torchrelay.engine.kernels.attention import AttentionBackend
from torchrelay.engine.kernels.capture import Capturer, Replay
from torchrelay.engine.kernels.layer import LayerView
from torchrelay.engine.model.batch import Batch, LayerKind
from torchrelay.engine.model.decoder import Decoder

_log = logging.getLogger(__name__)
BATCH_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Recorded before a batch needs them. The largest comes first, since the smaller ones then fit into its memory.
SIZES_AHEAD: Final = (32, 24, 16, 8, 4, 2, 1)


def batch_size_for(num_decoding: int, num_chunks: int, layer: int, sizes: Sequence[int] = BATCH_SIZES) -> int | None:
    """The size of the fixed batch for a batch at a layer boundary. None: the batch is computed without a recording."""
    if num_chunks or layer or not num_decoding:
        return None
    return next((size for size in sizes if size >= num_decoding), None)


@dataclass(frozen=True, slots=True)
class ScratchSlot:
    """The slot that unused rows write to, and the length of the longest sequence."""

    slot: int
    max_positions: int


@dataclass(eq=False)
class DecodeGraphs:
    """The recordings of one model. All methods run on the engine thread.

    A recording may compile kernels, which takes seconds. ``is_recording`` and ``num_recorded`` tell any thread that
    watches the engine, so that it does not mistake a recording for a step that hangs.
    """

    _decoder: Decoder
    _backend: AttentionBackend
    _kinds: Sequence[LayerKind]
    _num_layers: int
    _scratch: ScratchSlot
    _capturer: Capturer
    _is_loaded: Callable[[], bool]  # every layer has arrived, so that a recording lacks none
    _dtype: torch.dtype
    _device: torch.device
    _recorded: dict[int, tuple[FixedBatch, Replay] | None] = field(default_factory=dict)  # None: it failed
    is_recording: bool = False
    num_recorded: int = 0

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [rows, vocab], valid until the next run. None: this batch is computed without a recording."""
        plan = batch.plan
        size = batch_size_for(len(plan.decoding), len(plan.chunks), plan.layer)
        if size is None or batch.adapted is not None or not self._is_loaded():
            return None
        self.record(size)
        if (recorded := self._recorded[size]) is None:
            return None
        fixed, replay = recorded
        fixed.fill(batch)
        return replay()[: len(plan.decoding)]

    def record(self, size: int) -> None:
        """Records a size, once."""
        if size in self._recorded:
            return
        self.is_recording = True
        try:
            fixed = FixedBatch(size, self._backend, self._kinds, self._scratch, self._dtype, self._device)
            self._recorded[size] = fixed, self._capturer.capture(lambda: self._compute(fixed.batch))
        except Exception:  # no memory, or a kernel that cannot be recorded; the next step shows a fault of the device
            _log.warning("a decode step of %d rows is not recorded", size, exc_info=True)
            self._recorded[size] = None
        finally:
            self.num_recorded += 1  # before the next line: a thread that sees the end sees the advance too
            self.is_recording = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes recorded so far."""
        return tuple(size for size, recorded in self._recorded.items() if recorded is not None)

    def close(self) -> None:
        """Releases the recordings and their memory."""
        self._recorded.clear()

    def _compute(self, batch: Batch) -> Tensor:
        hidden = self._decoder.embed(batch)
        for layer in range(self._num_layers):
            hidden = self._decoder.run_layer(layer, hidden, batch)
        return self._decoder.logits(hidden)


class FixedBatch:
    """A batch of ``size`` decoding rows whose tensors keep their addresses."""

    def __init__(
        self,
        size: int,
        backend: AttentionBackend,
        kinds: Sequence[LayerKind],
        scratch: ScratchSlot,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self._scratch_slots = torch.full((size,), scratch.slot, dtype=torch.int64, device=device)
        token_ids = torch.zeros_like(self._scratch_slots)
        views = tuple(
            LayerView(
                *kind.rope.angles(token_ids, dtype),
                backend.fixed_plan(size, scratch.max_positions, kind.window, scratch.slot, device),
            )
            for kind in kinds
        )
        self.batch = Batch(BatchPlan((), ()), token_ids, self._scratch_slots.clone(), views, size)

    def fill(self, batch: Batch) -> None:
        """Replaces the contents by a batch of at most ``size`` decoding rows."""
        num_rows, fixed = len(batch.token_ids), self.batch
        fixed.token_ids[:num_rows].copy_(batch.token_ids)
        fixed.write_slots[:num_rows].copy_(batch.write_slots)
        fixed.write_slots[num_rows:].copy_(self._scratch_slots[num_rows:])
        for view, given in zip(fixed.views, batch.views, strict=True):
            view.cos[:num_rows].copy_(given.cos)
            view.sin[:num_rows].copy_(given.sin)
            self._backend.refill(view.attention, given.attention)

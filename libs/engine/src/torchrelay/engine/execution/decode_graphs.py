"""Decode steps as CUDA graphs: recorded once per size of batch, then replayed with one launch.

A step of a few rows is hundreds of kernels of microseconds each, less than it takes to launch them. A recording keeps
the addresses it was made with, so a batch is copied into a *fixed* one of the next larger size; rows that are left
over compute with an old token and write to a scratch slot, which no other row reads.

    eager --all layers there, only decoding, a size we have--> recorded at its first batch --> replayed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.batching.sequences import BatchPlan
from torchrelay.engine.kernels.attention import AttentionBackend
from torchrelay.engine.model.batch import Batch, LayerKind, LayerView
from torchrelay.engine.model.decoder import Decoder

BATCH_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Replay = Callable[[], Tensor]


class Capturer(ABC):
    @abstractmethod
    def capture(self, compute: Callable[[], Tensor]) -> Replay:
        """Records what ``compute`` does; the result repeats it, and gives the same tensor each time."""


class CallingCapturer(Capturer):
    """Records nothing: a replay is a call. For tests, which so run on the same fixed batches anywhere."""

    def capture(self, compute: Callable[[], Tensor]) -> Replay:
        return compute


class CudaCapturer(Capturer):
    """CUDA graphs in one memory pool: what a replay gave is good until the next one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], Tensor]) -> Replay:
        # Once outside of the recording, and on another stream as there: kernels are compiled, workspaces allocated.
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            compute()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy to the device meanwhile: that is none of this recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def capturer_for(device: torch.device) -> Capturer | None:
    """None: steps are not recorded on such a device."""
    return CudaCapturer() if device.type == "cuda" else None


def batch_size_for(num_decoding: int, num_chunks: int, layer: int, sizes: Sequence[int] = BATCH_SIZES) -> int | None:
    """The fixed batch that a batch at a layer boundary goes into; None: it is computed as it is."""
    if num_chunks or layer or not num_decoding:
        return None
    return next((size for size in sizes if size >= num_decoding), None)


@dataclass(frozen=True, slots=True)
class ScratchSlot:
    """What fixed batches are made for: the slot that rows of nobody write to, and the longest sequence."""

    slot: int
    max_positions: int


class DecodeGraphs:
    """The recordings of one model. All methods on the engine's thread."""

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        kinds: Sequence[LayerKind],
        num_layers: int,
        scratch: ScratchSlot,
        capturer: Capturer,
        is_loaded: Callable[[], bool],
    ) -> None:
        """``is_loaded``: every layer is there, so that a recording waits for none."""
        self._decoder, self._backend, self._kinds, self._num_layers = decoder, backend, kinds, num_layers
        self._scratch, self._capturer, self._is_loaded = scratch, capturer, is_loaded
        self._recorded: dict[int, tuple[FixedBatch, Replay]] = {}

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [rows, vocab], good until the next run; None: this batch is to be computed as it is."""
        plan = batch.plan
        size = batch_size_for(len(plan.decoding), len(plan.chunks), plan.layer)
        if size is None or not self._is_loaded():
            return None
        if size not in self._recorded:
            fixed = FixedBatch(size, batch, self._backend, self._kinds, self._scratch)
            fixed.fill(batch)
            self._recorded[size] = fixed, self._capturer.capture(lambda: self._compute(fixed.batch))
        fixed, replay = self._recorded[size]
        fixed.fill(batch)
        return replay()[: len(plan.decoding)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those recorded so far."""
        return tuple(self._recorded)

    def close(self) -> None:
        """Lets go of the recordings and their memory."""
        self._recorded.clear()

    def _compute(self, batch: Batch) -> Tensor:
        hidden = self._decoder.embed(batch.token_ids)
        for layer in range(self._num_layers):
            hidden = self._decoder.run_layer(layer, hidden, batch)
        return self._decoder.logits(hidden)


class FixedBatch:
    """A batch of ``size`` decoding rows whose tensors stay where they are."""

    def __init__(
        self,
        size: int,
        like: Batch,
        backend: AttentionBackend,
        kinds: Sequence[LayerKind],
        scratch: ScratchSlot,
    ) -> None:
        device = like.token_ids.device
        self._backend = backend
        self._scratch_slots = torch.full((size,), scratch.slot, dtype=torch.int64, device=device)
        views = tuple(
            LayerView(
                view.cos.new_zeros(size, *view.cos.shape[1:]),
                view.sin.new_zeros(size, *view.sin.shape[1:]),
                backend.fixed_plan(size, scratch.max_positions, kind.window, scratch.slot, device),
            )
            for kind, view in zip(kinds, like.views, strict=True)
        )
        token_ids = torch.zeros_like(self._scratch_slots)
        self.batch = Batch(BatchPlan((), ()), token_ids, self._scratch_slots.clone(), views, size)

    def fill(self, batch: Batch) -> None:
        """Puts a batch of at most so many decoding rows in the place of the last one."""
        num_rows, own = len(batch.token_ids), self.batch
        own.token_ids[:num_rows].copy_(batch.token_ids)
        own.write_slots[:num_rows].copy_(batch.write_slots)
        own.write_slots[num_rows:].copy_(self._scratch_slots[num_rows:])
        for view, given in zip(own.views, batch.views, strict=True):
            view.cos[:num_rows].copy_(given.cos)
            view.sin[:num_rows].copy_(given.sin)
            self._backend.refill(view.attention, given.attention)

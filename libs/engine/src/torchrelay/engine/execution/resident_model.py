"""A model in a slot: its weights as they arrive, its pages, and the backends that compute with both."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from torchrelay.common.process.heap import trim_heap
from torchrelay.engine import profile
from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk, SequenceGroup
from torchrelay.engine.core import ChoiceSpec, GroupSpec, SamplingParams
from torchrelay.engine.execution.decode_graphs import SIZES_AHEAD, DecodeGraphs, ScratchSlot
from torchrelay.engine.kernels.backends import Backends
from torchrelay.engine.kernels.capture import Capturer
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kv.hidden_states import HiddenStates
from torchrelay.engine.kv.layout import KvShape
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.model.batch import Batch, layer_kinds, make_batch
from torchrelay.engine.model.decoder import Decoder
from torchrelay.engine.model.encoder import Encoder
from torchrelay.engine.profile import Activity
from torchrelay.engine.weights.device_link import DeviceLink
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.engine.weights.reorderer import Reorderer
from torchrelay.modelspec.config import ModelConfig
from torchrelay.transfer.manifest import Manifest

# Hidden states that prompts hold between layers while the model loads. They lie outside the pool, so they may take only
# a small part of what it takes. A position of Llama 3.1 8B has 8 KB of them, and 128 KB of KV.
_HIDDEN_STATES_SHARE: Final = 1 / 16
_log = logging.getLogger(__name__)


class ResidentModel:
    """The state of a model on its device. All methods run on the engine thread, except those marked (any thread).

    ``Instance`` describes the parameters.
    """

    def __init__(
        self,
        manifest: Manifest,
        config: ModelConfig,
        data: memoryview,
        pool: KvPool,
        page_tokens: int,
        backends: Backends,
        link: DeviceLink | None,
        reorderer: Callable[[PackWeights, int], Reorderer] | None,
        on_segment: Callable[[], None] | None,
        active_processes: ActiveProcesses | None,
        decodes: bool,
    ) -> None:
        self.config = config
        self.kv_shape = KvShape.of(config, manifest.dtype)
        self.device = pool.device
        self.weights = PackWeights(manifest, config, data, link)
        if on_segment is not None:
            self.weights.gate.on_change = on_segment
        dtype, capturer = self.weights.dtype, backends.capturer
        self.pages = pool.partition(self.kv_shape, dtype, page_tokens, has_scratch=capturer is not None)
        hidden_bytes = config.hidden_size * dtype.itemsize
        self.hidden_states = HiddenStates(int(pool.num_bytes * _HIDDEN_STATES_SHARE) // hidden_bytes)
        self.backend = backends.attention(page_tokens)
        self._kinds, kinds = layer_kinds(config, pool.device)
        self.graphs: DecodeGraphs | None = None
        self._preparations: deque[Callable[[], None]] = deque()  # in the order in which they are made
        self._num_compiled, self._is_compiling = backends.num_compiled, backends.is_compiling
        if config.encoder is not None:
            self.transformer: Decoder | Encoder = Encoder(config, config.encoder, self.weights)
        else:
            fused_ops = backends.fused_ops if config.rotates_whole_heads else None
            whole_layers = backends.whole_layers and backends.whole_layers(config, dtype, kinds, active_processes)
            self.transformer = decoder = Decoder(
                config, self.weights, self.pages.kv, self.backend, kinds, fused_ops, whole_layers
            )
            self.graphs = self._graphs(decoder, capturer)
            if capturer is not None and self.pages.kv.numel():
                self._preparations.append(partial(self._compile_prompt, decoder))
                if self.graphs is not None and decodes and config.has_head:
                    self._preparations += (partial(self.graphs.record, size) for size in SIZES_AHEAD)
        self.reorderer = reorderer and reorderer(self.weights, config.num_layers)

    def _graphs(self, decoder: Decoder, capturer: Capturer | None) -> DecodeGraphs | None:
        # With experts the rows decide which weights are used: each step differs.
        if capturer is None or self.config.experts is not None or not self.backend.replays:
            return None
        max_positions = min(self.config.max_context_tokens, self.pages.tables.scratch_slot)
        scratch = ScratchSlot(self.pages.tables.scratch_slot, max_positions)
        gate = self.weights.gate
        return DecodeGraphs(
            decoder,
            self.backend,
            self._kinds,
            self.config.num_layers,
            scratch,
            capturer,
            lambda: gate.all_open,
            self.weights.dtype,
            self.device,
        )

    def _compile_prompt(self, decoder: Decoder) -> None:
        """Compiles the kernels of prompts: computes a page of tokens, whose KV goes to the scratch page."""
        tables, num_layers, layer = self.pages.tables, self.config.num_layers, 0
        num_tokens = tables.page_tokens
        spec = GroupSpec("", (0,) * num_tokens, num_tokens, SamplingParams(), (ChoiceSpec(0),))
        (context,) = SequenceGroup.of(spec).contexts
        context.slots = tables.scratch_slot + np.arange(num_tokens)
        batch = self.lay_out(BatchPlan((), (PrefillChunk(context, 0, num_tokens),)))
        hidden = decoder.embed(batch)
        while layer < num_layers:
            hidden, layer = decoder.run_layers(layer, num_layers, hidden, batch)
        if self.config.has_head:
            decoder.logits(hidden)

    def segment_ready(self, segment: int) -> None:
        """(any thread) Takes a segment into use whose bytes are verified. Idempotent."""
        self.weights.load(segment)
        if self.reorderer is not None and self.weights.gate.all_open:
            self.reorderer.start()

    @property
    def is_loading(self) -> bool:
        """Whether segments are still to come."""
        return not self.weights.gate.all_settled

    def can_run(self, layer: int) -> bool:
        """Whether the weights of a layer, and the embeddings for the first, are here."""
        gate = self.weights.gate
        return layer < self.config.num_layers and gate.is_open(layer + 1) and (layer > 0 or gate.is_open(0))

    def lay_out(self, plan: BatchPlan) -> Batch:
        before = profile.enter(Activity.SCHEDULING)
        batch = make_batch(plan, self._kinds, self.backend, self.weights.dtype, self.device)
        profile.enter(before)
        return batch

    @property
    def is_to_prepare(self) -> bool:
        """Whether the whole model is here, and something is left to compile or to record ahead of batches."""
        return bool(self._preparations) and self.weights.gate.all_open

    def prepare(self) -> None:
        """Makes the next preparation, which takes up to seconds; it counts for no step. After a failure makes none."""
        try:
            self._preparations.popleft()()
        except Exception:  # of a compiler or of the device, whose faults the next step shows
            _log.warning("a preparation has failed; steps compile and record by themselves", exc_info=True)
            self._preparations.clear()
        profile.take()

    @property
    def num_prepared(self) -> int:
        """(any thread) Kernels that were compiled and steps that were recorded."""
        return self._num_compiled() + (self.graphs.num_recorded if self.graphs is not None else 0)

    @property
    def is_preparing(self) -> bool:
        """(any thread) Whether a kernel is being compiled or a step recorded."""
        return self._is_compiling() or (self.graphs is not None and self.graphs.is_recording)

    def close(self) -> None:
        """Releases the pack's memory."""
        self._preparations.clear()
        if self.graphs is not None:
            self.graphs.close()
        if self.reorderer is not None:
            self.reorderer.close()
        self.weights.close()
        if self.reorderer is not None:
            trim_heap()

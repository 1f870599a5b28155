"""A model in a slot: its weights as they come, its pages, and what computes with both."""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.engine import profile
from torchrelay.engine.batching.sequences import BatchPlan
from torchrelay.engine.execution.decode_graphs import Capturer, DecodeGraphs, ScratchSlot, capturer_for
from torchrelay.engine.kernels.attention import attention_backend, default_backend
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kv.layout import KvShape
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.model.batch import Batch, layer_kinds, make_batch
from torchrelay.engine.model.decoder import Decoder
from torchrelay.engine.profile import Activity
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.engine.weights.reorderer import Reorderer, trim_heap
from torchrelay.modelspec.config import read_config
from torchrelay.transfer.manifest import Manifest


class ResidentModel:
    """All methods from the engine thread, except those marked (any thread). The parameters are ``Instance``'s."""

    def __init__(
        self,
        manifest: Manifest,
        data: memoryview,
        pool: KvPool,
        page_tokens: int,
        attention: str | None,
        capturer: Capturer | None,
        cpu_reorder: bool,
        on_segment: Callable[[], None] | None,
        active_processes: ActiveProcesses | None,
    ) -> None:
        self.config = read_config(manifest.config)
        self.kv_shape = KvShape.of(self.config, manifest.dtype)
        self.device = pool.device
        self.weights = PackWeights(manifest, self.config, data, pool.device)
        self.weights.gate.on_change = on_segment
        capturer = capturer or capturer_for(pool.device)
        self.pages = pool.partition(self.kv_shape, self.weights.dtype, page_tokens, has_scratch=capturer is not None)
        self.backend = attention_backend(attention or default_backend(pool.device), page_tokens)
        self._kinds, kind_of_layer = layer_kinds(self.config, pool.device)
        self.decoder = Decoder(self.config, self.weights, self.pages.kv, self.backend, kind_of_layer, active_processes)
        self.graphs = self._graphs(capturer)
        reorders = cpu_reorder and pool.device.type == "cpu"
        self.reorderer = Reorderer(self.weights, self.config.num_layers) if reorders else None

    def _graphs(self, capturer: Capturer | None) -> DecodeGraphs | None:
        # Which experts a row goes to decides what is computed: such a step differs each time.
        if capturer is None or self.config.experts is not None or not self.backend.replays:
            return None
        max_positions = min(self.config.max_context_tokens, self.pages.scratch_slot)
        scratch = ScratchSlot(self.pages.scratch_slot, max_positions)
        gate = self.weights.gate
        return DecodeGraphs(
            self.decoder, self.backend, self._kinds, self.config.num_layers, scratch, capturer, lambda: gate.all_open
        )

    def segment_ready(self, segment: int) -> None:
        """(any thread) The segment's bytes are verified. Idempotent."""
        self.weights.load(segment)
        if self.reorderer is not None and self.weights.gate.all_open:
            self.reorderer.start()

    def can_run(self, layer: int) -> bool:
        """Whether nothing is waited for with a layer, or the head, and the embeddings (which may be tied to it): they
        are there, or will never be, which the step then tells.
        """
        return self.weights.gate.is_settled(layer + 1) and self.weights.gate.is_settled(0)

    def lay_out(self, plan: BatchPlan) -> Batch:
        before = profile.enter(Activity.SCHEDULING)
        batch = make_batch(plan, self._kinds, self.backend, self.weights.dtype, self.device)
        profile.enter(before)
        return batch

    def close(self) -> None:
        """Lets go of the pack's memory."""
        if self.reorderer is not None:
            self.reorderer.close()
        self.weights.close()
        if self.reorderer is not None:
            trim_heap()

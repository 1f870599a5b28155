"""The entry point of the engine: one model in one slot, prompts in, tokens out, one batch per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.common.latency.latency_model import NO_WORK, StepWork
from torchrelay.common.tokens.prefix_hashes import PAGE_TOKENS
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.decode_shares import Latency, no_latency
from torchrelay.engine.batching.interruptions import Interruptions
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.batching.validation import check_output, check_sampled_tokens, check_tokens
from torchrelay.engine.core import EMPTY_STEP, GroupSpec, KvBlock, LoadFailed, StepResult
from torchrelay.engine.execution.model_runner import ModelRunner
from torchrelay.engine.execution.resident_model import ResidentModel
from torchrelay.engine.execution.stepper import Stepper
from torchrelay.engine.kernels.backends import Backends, backends_for
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.threads import ThreadBudget
from torchrelay.engine.kv.export import MIN_HANDOVER_BYTES, KvExport, PrefillExport
from torchrelay.engine.kv.kv_import import KvImport
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.kv.prefill_import import PrefillImport
from torchrelay.engine.weights.adapter import AdapterReader
from torchrelay.engine.weights.device_link import DeviceLink, link_to
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.engine.weights.reorderer import Reorderer
from torchrelay.modelspec.config import ModelConfig, read_config
from torchrelay.transfer.manifest import Manifest


class Instance:
    """A model in a slot. All methods run on one engine thread, except those marked (any thread).

    An instance is built before its weights arrive, which reads the manifest and partitions the pool. While they arrive,
    prompts run layer by layer with the weights that are here; a step never waits.
    """

    def __init__(
        self,
        manifest: Manifest,
        data: memoryview,
        pool: KvPool,
        token_budget: int = 512,
        page_tokens: int = PAGE_TOKENS,
        kv_block_tokens: int = 256,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
        cpu_reorder: bool = False,
        on_segment: Callable[[], None] | None = None,
        active_processes: ActiveProcesses | None = None,
        latency: Latency = no_latency,
        between_layers: Callable[[], None] = lambda: None,
        decodes: bool = True,
        *,
        config: ModelConfig | None = None,
        backends: Backends | None = None,
        link: DeviceLink | None = None,
        reorderer: Callable[[PackWeights, int], Reorderer] = Reorderer,
        threads: ThreadBudget | None = None,
        min_handover_bytes: int = MIN_HANDOVER_BYTES,
    ) -> None:
        """``data`` is the pack, which is only read; a CPU computes with it in place until ``close``.

        ``token_budget`` bounds the positions of one batch, ``kv_block_tokens`` is the block size of exported KV. With
        ``prefix_cache`` prompts of one tenant compute a common prefix once. With ``cpu_reorder`` copies of a decoder's
        weights that a CPU reads more quickly are made in the background once all weights have arrived. ``on_segment``
        is called, on any thread, when a segment becomes usable or when no more will arrive: there may be work now.
        ``active_processes`` are the processes that share this CPU's cores. ``latency`` returns the model of step times,
        with which no tenant's choices slow another's by more than its share. ``between_layers`` is called before each
        call of layers; it may import and continue other prompts than the step computes. Unless it ``decodes``, no
        decode step is recorded ahead.

        The keyword-only arguments replace the defaults for the manifest and the device.
        """
        device, config = pool.device, config or read_config(manifest.config)
        self.model = model = ResidentModel(
            manifest,
            config,
            data,
            pool,
            page_tokens,
            backends or backends_for(device),
            link or link_to(device),
            reorderer if cpu_reorder and device.type == "cpu" and config.encoder is None else None,
            on_segment,
            active_processes,
            decodes,
        )
        self.config, self.kv_shape = config, model.kv_shape
        self._is_encoder = config.encoder is not None
        if self._is_encoder:  # each position depends on all others: prompts are computed whole, and share no prefix
            token_budget, prefix_cache = max(token_budget, config.max_context_tokens), False
        self._kv_block_tokens = kv_block_tokens
        self._tables = model.pages.tables
        prefixes = PrefixCache(self._tables.allocator, page_tokens, prefix_cache)
        copy_page, on_leave = model.pages.copy_page, model.hidden_states.drop
        self._scheduler = BatchScheduler(
            self._tables,
            prefixes,
            token_budget,
            config.max_context_tokens,
            copy_page,
            on_leave,
            latency,
            config.num_layers,
            whole_prompts=self._is_encoder,
        )
        self._interruptions = Interruptions(self._scheduler, clock)
        self._between_layers = between_layers
        self._threads = threads or ThreadBudget(manifest.num_bytes, active_processes)
        self._export = KvExport(model.pages, model.hidden_states, self.kv_layout, min_handover_bytes)
        runner = ModelRunner(model, self._export, self._interrupt)
        self._num_layer_calls = 0  # that have begun
        self._stepper = Stepper(
            self._scheduler,
            runner,
            self._interruptions,
            lambda: model.is_loading,
            model.can_run,
            lambda: model.hidden_states.num_free_positions,
            token_budget,
        )

    # Loading

    def segment_ready(self, segment: int) -> None:
        """(any thread) Takes a segment into use whose bytes are verified. Idempotent."""
        self.model.segment_ready(segment)

    def fail(self, reason: str) -> None:
        """(any thread) Declares that no more bytes will arrive: the next step that needs more raises ``LoadFailed``."""
        self.model.weights.gate.fail(reason)

    @property
    def is_ready(self) -> bool:
        """(any thread) Whether no segment is still to come, or on its way to the device. Raises ``LoadFailed`` if the
        device has refused one.
        """
        if self.model.weights.are_settled and not self.model.weights.gate.all_open:
            raise LoadFailed(self.model.weights.gate.failure)
        return self.model.weights.are_settled

    @property
    def num_segments_ready(self) -> int:
        """(any thread) Segments that have arrived."""
        return self.model.weights.gate.num_open

    def close(self) -> None:
        """Releases ``data``, so that its mapping can be closed. The instance cannot be used afterwards."""
        self._threads.restore()
        self.model.close()

    # Requests

    def adapter_reader(self, adapter_id: str, document: bytes, weights: bytes) -> AdapterReader:
        """(any thread) A reader of an adapter for the groups to come, from its adapter_config.json and its tensors. It
        reads on the engine's thread. Raises ``DataCorrupted``.
        """
        return AdapterReader(adapter_id, document, weights, self.config, self.model.weights.dtype, self.model.device)

    def kv_layout(self, group: GroupSpec) -> KvLayout:
        """(any thread) The wire layout of the group's KV when this instance hands it over."""
        return KvLayout.of(self.kv_shape, self._kv_block_tokens, group)

    def prefill(self, group: GroupSpec, on_kv: Callable[[KvBlock], None] | None = None) -> None:
        """Queues a prompt.

        With ``on_kv`` the KV is handed over: ``on_kv`` is called on the engine thread with each block of each layer
        once that is computed, and the group ends here with its first tokens. Without ``on_kv`` the group decodes here.

        While the model loads, whole prompts run layer by layer, each layer once its weights have arrived; afterwards
        they continue in chunks within the token budget.

        Raises ``InvalidRequest`` (also ``ContextLengthExceeded``) or ``Conflict``.
        """
        check_tokens(group, self.config.vocab_size)
        check_output(group, self.config.has_head, self._is_encoder)
        queued = SequenceGroup.of(group, on_kv)
        self._scheduler.submit(queued)
        self._interruptions.deadlines.add(queued)

    def import_kv(self, group: GroupSpec, layout: KvLayout) -> KvImport:
        """Reserves pages for a group that another worker prefills, and for its tokens to come.

        ``layout`` is the offer's; its block size may differ from this instance's. Raises ``KvPoolFull`` (retry when
        pages are freed), ``InvalidRequest`` or ``Conflict``.
        """
        if layout.block_tokens < 1 or layout != KvLayout.of(self.kv_shape, layout.block_tokens, group):
            message = f"the KV offered for {group.group_id} does not match the model and the request"
            raise InvalidRequest(message, field="sequences")
        check_sampled_tokens(group, self.config.vocab_size)
        check_output(group, self.config.has_head, self._is_encoder)
        model = self.model
        kv_import = KvImport(group, layout, model.pages, model.hidden_states, self._scheduler, self.config.vocab_size)
        self._interruptions.deadlines.add(kv_import.imported)
        return kv_import

    def import_prefill(
        self,
        group: GroupSpec,
        on_kv: Callable[[KvBlock], None] | None = None,
        on_pages: Callable[[], None] = lambda: None,
    ) -> PrefillImport:
        """Queues a prompt that another instance has begun. It waits for pages like any prompt; ``on_pages`` is called
        on the engine thread when it has them, now or in a later step. Only then should the other instance export it.

        ``on_kv`` means the same as in ``prefill``, and also gets the KV that was imported. Raises ``InvalidRequest`` or
        ``Conflict``.
        """
        check_tokens(group, self.config.vocab_size)
        check_output(group, self.config.has_head, self._is_encoder)
        imported = SequenceGroup.of(group, on_kv, on_pages)
        model = self.model
        layout_of = partial(self._prefill_layout, group)
        prefill_import = PrefillImport(
            imported, layout_of, model.pages, model.hidden_states, self._scheduler, self._export
        )
        self._interruptions.deadlines.add(imported)
        self._scheduler.admit(by_layer=model.is_loading, preempts=False)  # a step may be running
        return prefill_import

    def export_prefill(self, group_id: str) -> PrefillExport:
        """Stops a prompt that waits, or runs layer by layer, to be read and then cancelled. With nothing computed, it
        is cancelled at once.

        Raises ``Conflict`` for a prompt whose chunks are at different layers, that decodes, or that is not here, and
        for one that an encoder has begun, which has no KV.
        """
        group = self._scheduler.get(group_id)
        if group is None or not group.can_be_exported or (group.layer and self._is_encoder):
            raise Conflict(f"{group_id} is not at a layer boundary here")
        spec = group.spec_left()
        exported = PrefillExport(
            group, spec, self._prefill_layout(spec, group.layer, self._kv_block_tokens), self._export
        )
        if group.layer:
            self._scheduler.hold(group)
        else:
            self._scheduler.cancel(group_id)
        return exported

    def _prefill_layout(self, group: GroupSpec, boundary: int, block_tokens: int) -> KvLayout:
        return KvLayout.of_move(self.kv_shape, block_tokens, group, boundary, self.config.hidden_size)

    def preempt(self, group_id: str) -> None:
        """Frees the pages of a group at once; the group waits again and continues later with the same tokens.

        A group that waits or is gone is left alone. Raises ``Conflict`` for a group that cannot be recomputed here: its
        KV was imported, or with all its output it exceeds the pool.
        """
        self._scheduler.preempt(group_id)

    def cancel(self, group_id: str, choice: int | None = None) -> None:
        """Frees the pages of a group, or of one choice, at once; it yields no more tokens."""
        self._interruptions.cancels.discard(group_id, choice)
        self._scheduler.cancel(group_id, choice)

    def cancel_soon(self, group_id: str, choice: int | None = None) -> None:
        """(any thread) Does the same as ``cancel`` between two layers of the running step, or before the next step."""
        self._interruptions.cancels.put(group_id, choice)

    @property
    def running_work(self) -> StepWork:
        """(any thread) The work of the running step, or of the last step."""
        return self._stepper.work

    @property
    def is_recording(self) -> bool:
        """(any thread) Whether the running step compiles or records kernels, which takes longer than its work would."""
        return self.model.is_preparing

    @property
    def num_advances(self) -> int:
        """(any thread) Calls of layers that have begun, and compilations and recordings that have ended."""
        return self._num_layer_calls + self.model.num_prepared

    # Memory

    @property
    def num_pages(self) -> int:
        return self._tables.allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._tables.allocator.num_free

    def groups(self) -> tuple[SequenceGroup, ...]:
        """All groups here, in order of arrival, for inspection only."""
        return self._scheduler.groups

    def check_integrity(self) -> None:
        """Compares the page counts with all tables. Raises ``AssertionError``."""
        self._scheduler.check_integrity()

    # Steps

    def has_work(self) -> bool:
        """Whether a step would compute anything now."""
        return self._stepper.has_work

    def max_sleep_s(self) -> float | None:
        """Seconds that the driver may sleep: until there is work, or a group's deadline. None: until the next call."""
        return 0.0 if self._stepper.has_work or self._is_to_prepare else self._interruptions.next_deadline_in_s()

    @property
    def _is_to_prepare(self) -> bool:
        return self.model.is_to_prepare and not self._scheduler.groups

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Computes a batch, or while the model loads one layer of prompts; ends groups past their deadline.

        Without a group here, and on a GPU, compiles or records what a later batch needs. Raises ``LoadFailed``; the
        batch is then as if it had never started.
        """
        if self._is_to_prepare:
            self.model.prepare()
            return EMPTY_STEP
        num_prepared = self.model.num_prepared
        try:
            result = self._stepper.step()
            # A step that compiled or recorded kernels took longer than its batch, and predicts nothing.
            return result if self.model.num_prepared == num_prepared else replace(result, work=NO_WORK)
        finally:
            if not self._stepper.has_work:
                self._threads.rest()

    def _interrupt(self) -> bool:
        """Ends the groups that are to end before the next call of layers; returns whether there were any."""
        self._num_layer_calls += 1
        self._between_layers()
        self._threads.adjust(self.model.weights.gate.all_open)
        return self._interruptions.apply()

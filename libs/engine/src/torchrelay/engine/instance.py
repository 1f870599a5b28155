"""One model in one slot: prompts in, tokens out, one batch at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.adoption import Adoption
from torchrelay.engine.attention import attention_backend
from torchrelay.engine.batch import Batch, layer_kinds, make_batch
from torchrelay.engine.core import EMPTY_STEP, GroupSpec, NewToken, StepResult
from torchrelay.engine.cores import CoreShare
from torchrelay.engine.handover import KvBlock, KvLayout, KvShape
from torchrelay.engine.model import Decoder
from torchrelay.engine.pool import KvPool
from torchrelay.engine.prefixes import PrefixCache
from torchrelay.engine.sampling import choose, draw_of_decoding, draws_of_context
from torchrelay.engine.scheduling import BatchScheduler
from torchrelay.engine.sequences import Chunk, Group
from torchrelay.engine.weights import Weights
from torchrelay.transfer.manifest import Manifest
from torchrelay.transfer.model_config import read_config


class Instance:
    """All methods from one engine thread, except those marked (any thread).

    Built before its weights are there: it only reads the manifest and cuts the pool. A step runs layer by layer and
    waits for each layer's segment before computing with it.
    """

    def __init__(
        self,
        manifest: Manifest,
        data: memoryview,
        pool: KvPool,
        token_budget: int = 512,
        page_tokens: int = 16,
        kv_block_tokens: int = 256,
        attention: str = "gather",
        prefix_cache: bool = True,
    ) -> None:
        """``data`` is the pack, read only; on a CPU it is computed with in place until ``close``.

        ``token_budget`` bounds the positions of one batch, ``kv_block_tokens`` is the block of KV handed over from
        here. ``prefix_cache``: prompts of one salt that begin alike compute the common part once.
        """
        self.config = read_config(manifest.config)
        self.kv_shape = KvShape.of(self.config, manifest.dtype)
        self._kv_block_tokens = kv_block_tokens
        self._device = pool.device
        self._weights = Weights(manifest, self.config, data, pool.device)
        self._pages = pool.cut(self.kv_shape, self._weights.dtype, page_tokens)
        self._backend = attention_backend(attention)
        self._kinds, kind_of_layer = layer_kinds(self.config, pool.device)
        self._decoder = Decoder(self.config, self._weights, self._pages.kv, self._backend, kind_of_layer)
        prefixes = PrefixCache(self._pages.allocator, page_tokens, prefix_cache)
        self._scheduler = BatchScheduler(self._pages, prefixes, token_budget, self.config.max_context_tokens)
        self._cores = CoreShare()

    # Loading

    def segment_ready(self, segment: int) -> None:
        """(any thread) The segment's bytes are verified. Idempotent."""
        self._weights.load(segment)

    def fail(self, reason: str) -> None:
        """(any thread) No more bytes will come: a step that needs them, or waits now, raises ``LoadFailed``."""
        self._weights.gate.fail(reason)

    @property
    def num_segments_ready(self) -> int:
        """(any thread)"""
        return self._weights.gate.num_open

    def close(self) -> None:
        """Lets go of ``data``, so that its mapping can be closed; the instance cannot be used any more."""
        self._cores.restore()
        self._weights.close()

    # Requests

    def kv_layout(self, group: GroupSpec) -> KvLayout:
        """(any thread) How this group's KV is handed over from here: what an offer says, and the buffer's chunks."""
        return KvLayout.of(self.kv_shape, self._kv_block_tokens, group)

    def prefill(self, group: GroupSpec, on_kv: Callable[[KvBlock], None] | None = None) -> None:
        """Queues a prompt.

        With ``on_kv`` it is handed over: that is called on the engine thread with each block of each layer as soon as
        it is computed, and the group ends here with its first tokens. Without, it goes on decoding here. Raises
        ``InvalidRequest`` (also ``ContextLengthExceeded``) or ``Conflict``.
        """
        forced = [token for spec in group.choices for token in spec.forced_output]
        if len(group.prompt) != group.num_prompt_tokens:
            found = f"the prompt has {len(group.prompt)} tokens, not {group.num_prompt_tokens}"
            raise InvalidRequest(found, field="prompt")
        tokens = (*group.prompt, *forced, 0)
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise InvalidRequest("a token of the prompt is not in the model's vocabulary", field="prompt")
        self._check_biases(group)
        self._scheduler.submit(Group.of(group, on_kv))

    def adopt(self, group: GroupSpec, layout: KvLayout) -> Adoption:
        """Reserves pages for a group that another worker prefills, with all its tokens to come.

        ``layout`` is the offer's. Raises ``KvPoolFull`` (try again as pages come free), ``InvalidRequest`` or
        ``Conflict``.
        """
        if layout.block_tokens < 1 or layout != KvLayout.of(self.kv_shape, layout.block_tokens, group):
            raise InvalidRequest(f"the KV offered for {group.group_id} does not fit the model and the request")
        self._check_biases(group)
        return Adoption(group, layout, self._pages, self._scheduler, self.config.vocab_size)

    def _check_biases(self, group: GroupSpec) -> None:
        if any(not 0 <= token < self.config.vocab_size for token, _ in group.sampling.logit_bias):
            raise InvalidRequest("a token of logit_bias is not in the model's vocabulary", field="logit_bias")

    def cancel(self, group_id: str, choice: int | None = None) -> None:
        """Frees the pages of a group, or of one of its choices, at once; no token of it comes any more."""
        self._scheduler.cancel(group_id, choice)

    # Memory

    @property
    def num_pages(self) -> int:
        return self._pages.allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._pages.allocator.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that one sequence of so many positions takes."""
        return self._pages.pages_for(num_tokens)

    def check_integrity(self) -> None:
        """Compares the page counts with every table there is. Raises ``AssertionError``."""
        self._scheduler.check_integrity()

    # Steps

    def has_work(self) -> bool:
        """Whether a step would compute anything now."""
        return self._scheduler.has_work

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Computes one batch. Raises ``LoadFailed``; the batch is then as if never begun."""
        begin_s = time.perf_counter()
        plan = self._scheduler.plan()
        if not plan:
            return EMPTY_STEP
        batch = make_batch(plan, self._kinds, self._backend, self._weights.dtype, self._device)
        tokens, prefilled = self._deliver(batch, self._run(batch))
        num_prefilled = sum(chunk.num_tokens for chunk in plan.chunks)
        return StepResult(tokens, prefilled, num_prefilled, len(plan.decoding), time.perf_counter() - begin_s)

    def run_layers(self, begin: int, end: int, hidden: Tensor, batch: Batch) -> Tensor:
        """Layers [begin, end) of a batch, [rows, hidden] to the same; hands over each layer's finished KV blocks."""
        handed_over = batch.handed_over
        for layer in range(begin, end):
            self._cores.settle(self._weights.gate.all_open)
            hidden = self._decoder.run_layer(layer, hidden, batch)
            for chunk in handed_over:
                self._hand_over(chunk, layer)
        return hidden

    def _run(self, batch: Batch) -> Tensor:
        hidden = self._decoder.embed(batch.token_ids)
        hidden = self.run_layers(0, self.config.num_layers, hidden, batch)
        return self._decoder.logits(hidden[batch.output_rows]) if len(batch.output_rows) else hidden[:0]

    def _hand_over(self, chunk: Chunk, layer: int) -> None:
        context = chunk.context
        on_kv = context.group.on_kv
        assert on_kv is not None, "only such chunks are handed over"
        layout = self.kv_layout(context.group.spec)
        for block in range(chunk.new_from // self._kv_block_tokens, layout.num_blocks(context.sequence)):
            index = layout.index_of(context.sequence, block, layer)
            place = layout.locate(index)
            if place.token_end > chunk.end:
                break
            slots = torch.from_numpy(context.slots[place.token_begin : place.token_end]).to(self._device)
            data = self._pages.kv[layer].index_select(1, slots).view(torch.uint8).cpu().numpy()
            on_kv(KvBlock(context.group.spec.group_id, index, data.reshape(-1).data))

    def _deliver(self, batch: Batch, logits: Tensor) -> tuple[tuple[NewToken, ...], tuple[str, ...]]:
        """Samples, and moves every sequence on. Gives the new tokens and the groups whose prefill ended."""
        plan = batch.plan
        for chunk in plan.chunks:
            self._scheduler.computed(chunk)
        ended = [chunk.context for chunk in plan.chunks if chunk.ends_context]
        draws = [draw_of_decoding(row, each) for row, each in enumerate(plan.decoding)]
        for row, context in enumerate(ended, len(plan.decoding)):
            draws += draws_of_context(row, context)
        tokens = choose(logits, draws)
        for decoding, token in zip(plan.decoding, tokens, strict=False):
            self._scheduler.advance(decoding, token)
        for context in ended:
            spec = context.group.spec
            goes_on = [token for token in tokens if token.group_id == spec.group_id and token.finish is None]
            first_tokens = {token.choice: token.token_id for token in goes_on}
            self._scheduler.start(context, {} if context.group.on_kv else first_tokens)
        prefilled = dict.fromkeys(context.group.spec.group_id for context in ended if not context.group.contexts)
        return tuple(tokens), tuple(prefilled)

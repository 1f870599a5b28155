"""The batch scheduler: decides which sequences compute in the next batch, and owns the pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from torchrelay.common.errors import Conflict
from torchrelay.common.fair_queue import FairQueue
from torchrelay.engine.batching.decode_shares import Latency, choices_to_decode, no_latency
from torchrelay.engine.batching.invariants import check_pages, check_states
from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.batching.preemption import groups_to_preempt
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.reservation import Reservations
from torchrelay.engine.batching.sequences import (
    BatchPlan,
    DecodeSequence,
    GroupState,
    PrefillChunk,
    PrefillContext,
    SequenceGroup,
    slots_of,
)
from torchrelay.engine.core import KvPoolFull, NewToken, grammar_state


class BatchScheduler:
    """Continuous batching, fair between tenants in pages, in prompt tokens and in the time of decode steps.

    A group is admitted once all pages that it can ever need are reserved. Hence an admitted group always finishes, and
    prefills never starve decoding. A group is preempted only if a tenant without pages waits while another tenant holds
    more than its share.
    """

    def __init__(
        self,
        pages: PageTables,
        prefixes: PrefixCache,
        token_budget: int,
        max_context_tokens: int,
        copy_page: Callable[[int, int], None],
        on_leave: Callable[[PrefillContext], None] = lambda context: None,
        latency: Latency = no_latency,
        num_layers: int = 1,
        whole_prompts: bool = False,
    ) -> None:
        """``copy_page(source, target)`` copies the KV of a page; ``on_leave`` is called with each context that ends
        or is preempted. With ``whole_prompts`` no prompt is divided; ``token_budget`` must then hold the longest.
        """
        self._pages = pages
        self._copy_page, self._on_leave = copy_page, on_leave
        self._prefixes = prefixes
        self._reservations = Reservations(pages, prefixes, max_context_tokens)
        self._token_budget, self._num_layers = token_budget, num_layers
        self._whole_prompts = whole_prompts
        self._groups: dict[str, SequenceGroup] = {}
        self._waiting: FairQueue[SequenceGroup] = FairQueue()
        self._prefilling: FairQueue[PrefillContext] = FairQueue()  # chunk by chunk, each through all layers
        self._by_layer: dict[SequenceGroup, None] = {}  # layer by layer, in order of admission
        self._decoding: dict[DecodeSequence, None] = {}  # in the order of their turns
        self._latency = latency
        self._held: Counter[str] = Counter()  # pages by tenant, as reserved
        self._moments = count()

    @property
    def has_work(self) -> bool:
        """Whether the next plan computes anything. A group that waits for pages held by imports does not count."""
        return bool(self._prefilling or self._decoding or self._by_layer) or self.can_admit

    @property
    def can_admit(self) -> bool:
        """Whether the next waiting group gets its pages now."""
        group = self._waiting.head()
        return group is not None and self._reservations.num_pages_lacking(group) <= 0

    @property
    def by_layer(self) -> Sequence[SequenceGroup]:
        """The groups that run layer by layer, in order of admission."""
        return tuple(self._by_layer)

    @property
    def groups(self) -> tuple[SequenceGroup, ...]:
        return tuple(self._groups.values())

    def get(self, group_id: str) -> SequenceGroup | None:
        return self._groups.get(group_id)

    def submit(self, group: SequenceGroup) -> None:
        """Queues a group for prefill. Raises ``InvalidRequest`` if it could never run here."""
        self._check(group)
        self._groups[group.spec.group_id] = group
        group.arrival_order = next(self._moments)
        self._waiting.push(group.spec.tenant_id, group)

    def receive(self, group: SequenceGroup) -> None:
        """Reserves pages for a group whose KV is computed elsewhere.

        Raises ``KvPoolFull``, also while other groups wait for pages.
        """
        self._check(group)
        if self._waiting:
            raise KvPoolFull(f"{len(self._waiting)} groups are waiting for KV pages already")
        if self._reservations.num_pages_lacking(group) > 0:
            num_needed = self._reservations.pages_for(group.contexts)
            raise KvPoolFull(f"{num_needed} KV pages are needed, {self._pages.allocator.num_free} are free")
        self._groups[group.spec.group_id] = group
        self._reserve(group)

    def run(self, group: SequenceGroup) -> None:
        """Continues contexts from their layer boundary, once everything computed elsewhere has arrived."""
        group.on_pages, group.state = None, GroupState.RUNNING
        if group.by_layer:
            self._by_layer[group] = None
            return
        self._continue_in_chunks([group])

    def hold(self, group: SequenceGroup) -> None:
        """Stops a running group at its layer boundary; it keeps its pages until it is cancelled."""
        self._by_layer.pop(group, None)
        for context in group.contexts:
            self._prefilling.remove(group.spec.tenant_id, context)
        group.state = GroupState.SENDING

    def _continue_in_chunks(self, groups: Iterable[SequenceGroup], *, first: bool = False) -> None:
        """Queues the contexts of groups; with ``first`` in front, the last group foremost."""
        for group in groups:
            for context in reversed(group.contexts) if first else group.contexts:
                self._prefilling.push(group.spec.tenant_id, context, first=first)

    # Batches

    def admit(self, by_layer: bool = False, *, preempts: bool = True) -> None:
        """Gives pages to waiting groups in turn; no group overtakes one that does not fit yet.

        With ``by_layer`` they run layer by layer. Without ``preempts``, running groups keep their pages, as they must
        during a step.
        """
        while (group := self._waiting.head()) is not None:
            if self._reservations.num_pages_lacking(group) > 0 and not (preempts and self._preempt_for(group)):
                return
            self._waiting.remove(group.spec.tenant_id, group)
            group.by_layer = by_layer
            self._reserve(group)
            if not group.was_preempted:  # else its pages were charged before
                self._waiting.charge(group.spec.tenant_id, group.num_pages)
            if group.on_pages is None:
                self.run(group)
            else:
                group.on_pages()

    def plan(self) -> tuple[BatchPlan, ...]:
        """The next batches: running choices as ``choices_to_decode`` selects them, and chunks of prompts in the budget.

        Chunks that continue from a layer boundary get a batch of their own. Prompts that have run layer by layer
        continue in chunks, those that have begun first.
        """
        by_layer, self._by_layer = tuple(self._by_layer), {}
        for group in by_layer:
            group.by_layer = False
        self._continue_in_chunks([group for group in by_layer if not group.layer])
        self._continue_in_chunks([group for group in reversed(by_layer) if group.layer], first=True)
        self.admit()
        head = self._prefilling.head()
        num_left = 0 if head is None else min(self._token_budget, head.num_tokens - head.num_computed)
        decoding = self._next_decoding(num_left)
        chunks: dict[int, list[PrefillChunk]] = {0: []}
        for chunk in self._next_chunks(len(decoding)):
            chunks.setdefault(chunk.context.group.layer, []).append(chunk)
        first = BatchPlan(decoding, tuple(chunks.pop(0)))
        rest = (BatchPlan((), tuple(of_layer), layer) for layer, of_layer in sorted(chunks.items()))
        return tuple(plan for plan in (first, *rest) if plan)

    def put_back(self, plans: Sequence[BatchPlan]) -> None:
        """Puts the chunks of batches that were not computed back in front."""
        for chunk in reversed([chunk for plan in plans for chunk in plan.chunks]):
            context = chunk.context
            if context.is_live and not context.group.by_layer and context.num_computed == chunk.begin:
                self._prefilling.remove(context.group.spec.tenant_id, context)
                self._prefilling.push(context.group.spec.tenant_id, context, first=True)

    def commit(self, plan: BatchPlan, tokens: Sequence[NewToken]) -> None:
        """Advances every sequence of a computed plan; ``tokens`` are in the order of ``sampling.sampler.draws_of``."""
        for chunk in plan.chunks:
            chunk.context.num_computed = chunk.end
        for decoding, token in zip(plan.decoding, tokens, strict=False):
            self.advance(decoding, token)
        for context in plan.ended_contexts:
            group = context.group
            unfinished = [token for token in tokens if token.group_id == group.spec.group_id and token.finish is None]
            first_tokens = {token.choice: token.token_id for token in unfinished}
            self.start(context, {} if group.on_kv else first_tokens)

    def start(self, context: PrefillContext, first_tokens: Mapping[int, int]) -> None:
        """Ends a computed context: choices with a first token start to decode, the others end."""
        group, spec, size = context.group, context.group.spec, self._pages.page_tokens
        if context.tables:
            self._prefixes.keep(spec.prefix_salt, context.tokens, context.tables[0])
        runs = [choice for choice in context.choices if choice in first_tokens]
        tables, spare = context.tables[: len(runs)], context.tables[len(runs) :]
        partial = context.num_tokens // size
        for choice, table in zip(runs, tables, strict=True):
            if context.num_tokens % size and table is not tables[0]:
                self._copy_page(tables[0][partial], table[partial])
            output = [*context.forced, first_tokens[choice]]
            counts = Counter(output) if spec.sampling.penalised else None
            slots = slots_of(table, size)
            state = grammar_state(spec.sampling, output)
            decoding = DecodeSequence(group, choice, table, slots, context.num_tokens, output, counts, state)
            group.decodings.append(decoding)
            self._decoding[decoding] = None
        self._release(spare)
        self._leave(context)

    def advance(self, decoding: DecodeSequence, token: NewToken) -> None:
        """Appends the next token to a running choice, which continues, or ends and frees its pages."""
        decoding.num_computed += 1
        decoding.output.append(token.token_id)
        if decoding.counts is not None:
            decoding.counts[token.token_id] += 1
        if token.finish is not None:
            self.finish(decoding)

    # Ends

    def finish(self, decoding: DecodeSequence) -> None:
        """Ends a running choice and frees its pages."""
        del self._decoding[decoding]
        decoding.group.decodings.remove(decoding)
        self._release([decoding.table])
        self._update_state(decoding.group)

    def cancel(self, group_id: str, choice: int | None = None) -> bool:
        """Frees the pages of a group, or of one choice, at once; returns False if it is gone already."""
        group = self._groups.get(group_id)
        if group is None:
            return False
        num_before = group.num_choices
        for decoding in [each for each in group.decodings if choice in (None, each.choice)]:
            self.finish(decoding)
        for context in tuple(group.contexts):
            self.drop(context, [each for each in context.choices if choice in (None, each)])
        return group.num_choices < num_before

    def preempt(self, group_id: str) -> None:
        """Frees the pages of a running group, which waits again at the front of its tenant's queue, with its output as
        forced output. A group that waits or is gone is left alone.

        Raises ``Conflict`` if the group could not run again: its prompt is unknown here, or it has outgrown the pool.
        """
        group = self._groups.get(group_id)
        if group is None or group.state is GroupState.WAITING:
            return
        if not self._can_be_preempted(group):
            raise Conflict(f"{group_id} cannot be recomputed here")
        left = group.contexts_left()
        for decoding in group.decodings:
            tokens = (*group.spec.prompt, *decoding.output)
            self._prefixes.keep(group.spec.prefix_salt, tokens[: decoding.num_computed], decoding.table)
            del self._decoding[decoding]
            self._release([decoding.table])
        for context in group.contexts:
            self._on_leave(context)
            self._prefilling.remove(group.spec.tenant_id, context)
            if context.tables:
                computed = context.tokens[: context.num_computed]
                self._prefixes.keep(group.spec.prefix_salt, computed, context.tables[0])
            self._release(context.tables)
        self._by_layer.pop(group, None)
        self._held -= Counter({group.spec.tenant_id: group.num_pages})
        group.contexts, group.decodings, group.num_pages = left, [], 0
        group.layer, group.was_preempted, group.state = 0, True, GroupState.WAITING
        self._waiting.push(group.spec.tenant_id, group, first=True)

    def check_integrity(self) -> None:
        """Checks the invariants of ``invariants``. Raises ``AssertionError``."""
        groups = self._groups.values()
        check_pages(self._pages.allocator, groups, self._held)
        self._prefixes.check_integrity()
        check_states(groups, self._waiting, self._prefilling, self._by_layer, self._decoding)

    # Internals

    def _next_decoding(self, num_prompt_tokens: int) -> tuple[DecodeSequence, ...]:
        """The choices of the next step, the shortest first.

        If some must wait, the chosen ones come last the next time.
        """
        chosen = choices_to_decode(self._decoding, self._latency, num_prompt_tokens)
        if len(chosen) < len(self._decoding):
            for each in chosen:
                del self._decoding[each]
                self._decoding[each] = None
        return tuple(sorted(chosen, key=lambda each: each.num_computed))

    def _next_chunks(self, num_decoding: int) -> list[PrefillChunk]:
        # Prefill advances by at least a page, however many choices decode.
        num_left = max(self._token_budget - num_decoding, self._pages.page_tokens)
        chunks: list[PrefillChunk] = []
        while num_left and (context := self._prefilling.head()) is not None:
            spec = context.group.spec
            needs_head_alone = context.group.layer == self._num_layers  # for its last position
            if chunks and chunks[-1].context.group.layer == self._num_layers and not needs_head_alone:
                break  # the tokens of finished prompts do not wait for those of a whole step
            if self._whole_prompts and context.num_tokens > num_left:
                break
            end = context.num_tokens if needs_head_alone else context.num_computed + num_left
            chunk = PrefillChunk(context, context.num_computed, min(end, context.num_tokens))
            chunks.append(chunk)
            num_charged = 1 if needs_head_alone else chunk.num_tokens
            num_left -= num_charged
            self._prefilling.charge(spec.tenant_id, num_charged)
            if chunk.ends_context:
                self._prefilling.remove(spec.tenant_id, context)
        return chunks

    def _reserve(self, group: SequenceGroup) -> None:
        self._reservations.reserve(group)
        self._held[group.spec.tenant_id] += group.num_pages
        group.state, group.admission_order = GroupState.RECEIVING, next(self._moments)

    def _preempt_for(self, wanting: SequenceGroup) -> bool:
        """Preempts groups of other tenants for a tenant that has no pages; returns whether the group fits now."""
        if wanting.was_preempted or self._held[wanting.spec.tenant_id]:
            return False
        num_pages, num_pages_lacking = self._pages.allocator.num_pages, self._reservations.num_pages_lacking(wanting)
        for group in groups_to_preempt(
            wanting, self._groups.values(), num_pages, num_pages_lacking, self._can_be_preempted
        ):
            self.preempt(group.spec.group_id)
        return self._reservations.num_pages_lacking(wanting) <= 0

    def _can_be_preempted(self, group: SequenceGroup) -> bool:
        is_known = group.state is GroupState.RUNNING and bool(group.spec.prompt)
        return is_known and self._reservations.could_run_again(group)

    def drop(self, context: PrefillContext, choices: Sequence[int]) -> None:
        """Ends choices of a context that is not computed yet, and frees all its pages with its last choice."""
        for choice in choices:
            context.choices.remove(choice)
        num_needed = min(len(context.tables), context.num_tables if context.choices else 0)
        self._release(context.tables[num_needed:])
        del context.tables[num_needed:]
        if not context.choices:
            self._leave(context)

    def _leave(self, context: PrefillContext) -> None:
        """Removes a context from its group and its queue."""
        group = context.group
        self._on_leave(context)
        group.contexts.remove(context)
        self._prefilling.remove(group.spec.tenant_id, context)
        self._update_state(group)

    def _update_state(self, group: SequenceGroup) -> None:
        """Sets the state of a group without contexts: it decodes, or is gone if it has no decodings either."""
        if group.contexts:
            return
        self._by_layer.pop(group, None)
        if group.decodings:
            group.state = GroupState.RUNNING
            return
        self._waiting.remove(group.spec.tenant_id, group)
        self._held -= Counter({group.spec.tenant_id: group.num_pages})
        group.state = GroupState.GONE
        del self._groups[group.spec.group_id]

    def _release(self, tables: Sequence[list[int]]) -> None:
        for table in tables:
            self._pages.allocator.release(table)

    def _check(self, group: SequenceGroup) -> None:
        if group.spec.group_id in self._groups:
            raise Conflict(f"group {group.spec.group_id} exists already")
        self._reservations.check(group)

"""Who computes in the next batch, and who owns which pages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from torchrelay.common.errors import Conflict, ContextLengthExceeded, InvalidRequest
from torchrelay.engine.core import GroupSpec, KvPoolFull, NewToken
from torchrelay.engine.pool import KvPages
from torchrelay.engine.prefixes import PrefixCache
from torchrelay.engine.sequences import Chunk, Context, Decoding, Group, Plan, slots_of


class BatchScheduler:
    """Continuous batching. Groups are admitted in order, each once pages for all it can ever need are reserved.

    Hence an admitted group always finishes: nothing is preempted, and decoding is never starved by prefills.
    """

    def __init__(self, pages: KvPages, prefixes: PrefixCache, token_budget: int, max_context_tokens: int) -> None:
        self._pages = pages
        self._prefixes = prefixes
        self._token_budget = token_budget
        self._max_context_tokens = max_context_tokens
        self._waiting: deque[Group] = deque()
        self._prefilling: list[Context] = []
        self._adopted: dict[str, Group] = {}
        self._decoding: list[Decoding] = []
        self._live: dict[str, int] = {}  # group id -> contexts and choices that it has here

    @property
    def has_work(self) -> bool:
        """Whether the next plan computes anything; a group that waits for pages held by adoptions does not count."""
        return bool(self._prefilling or self._decoding or (self._waiting and self._fits(self._waiting[0])))

    def submit(self, group: Group) -> None:
        """Queues a group for prefill. Raises ``InvalidRequest`` when it could never run here."""
        self._check(group)
        self._live[group.spec.group_id] = len(group.contexts)
        self._waiting.append(group)

    def adopt(self, group: Group) -> None:
        """Reserves pages for a group computed elsewhere. Raises ``KvPoolFull``; those that wait for pages go first."""
        self._check(group)
        if self._waiting:
            raise KvPoolFull(f"{len(self._waiting)} groups wait for KV pages already")
        if not self._fits(group):
            raise KvPoolFull(f"{self._pages_for(group)} KV pages are needed, {self._pages.allocator.num_free} are free")
        self._live[group.spec.group_id] = len(group.contexts)
        self._reserve(group)
        self._adopted[group.spec.group_id] = group

    def plan(self) -> Plan:
        """The next batch: every running choice, and chunks of prompts while the token budget lasts."""
        while self._waiting and self._fits(self._waiting[0]):
            group = self._waiting.popleft()
            self._reserve(group)
            self._prefilling += group.contexts
        # However many choices decode, prefill goes on by at least a page.
        room = max(self._token_budget - len(self._decoding), self._pages.page_tokens)
        chunks = []
        for context in self._prefilling:
            if not room:
                break
            end = min(context.num_computed + room, context.num_tokens)
            chunks.append(Chunk(context, context.num_computed, end))
            room -= chunks[-1].num_tokens
        return Plan(tuple(sorted(self._decoding, key=lambda each: each.num_computed)), tuple(chunks))

    def computed(self, chunk: Chunk) -> None:
        chunk.context.num_computed = chunk.end

    def start(self, context: Context, first_tokens: Mapping[int, int]) -> None:
        """A context is computed: each choice named goes on by itself from its first token, the others end."""
        self._leave(context)
        spec, size = context.group.spec, self._pages.page_tokens
        if context.tokens and context.tables:  # an adopted context's tokens are not known here
            self._prefixes.keep(spec.salt, context.tokens, context.tables[0])
        runs = [choice for choice in context.choices if choice in first_tokens]
        tables, spare = context.tables[: len(runs)], context.tables[len(runs) :]
        partial = context.num_tokens // size
        for choice, table in zip(runs, tables, strict=True):
            if context.num_tokens % size and table is not tables[0]:
                self._pages.copy_page(tables[0][partial], table[partial])
            token, position = first_tokens[choice], context.num_forced + 1
            slots = slots_of(table, size)
            counts = Counter((*spec.forced_output(choice), token)) if spec.sampling.penalised else None
            self._decoding.append(Decoding(spec, choice, table, slots, context.num_tokens, token, position, counts))
        for table in spare:
            self._pages.allocator.release(table)
        self._count(spec.group_id, len(runs) - 1)

    def advance(self, decoding: Decoding, token: NewToken) -> None:
        """A running choice got its next token: it goes on, or ends and frees its pages."""
        decoding.num_computed += 1
        decoding.last_token = token.token_id
        if decoding.counts is not None:
            decoding.counts[token.token_id] += 1
        decoding.next_position += 1
        if token.finish is not None:
            self.finish(decoding)

    def finish(self, decoding: Decoding) -> None:
        self._decoding.remove(decoding)
        self._pages.allocator.release(decoding.table)
        self._count(decoding.spec.group_id, -1)

    def cancel(self, group_id: str, choice: int | None) -> None:
        """Frees the pages of a group, or of one choice, at once; no error for one that is gone already."""
        if group_id not in self._live:
            return
        for decoding in [each for each in self._decoding if each.spec.group_id == group_id]:
            if choice is None or decoding.choice == choice:
                self.finish(decoding)
        for context in self._contexts_of(group_id):
            dropped = context.choices if choice is None else [choice] if choice in context.choices else []
            self._drop(context, list(dropped))

    def drop(self, context: Context) -> None:
        """Frees a context that will not be computed."""
        self._drop(context, list(context.choices))

    def check_integrity(self) -> None:
        """Every page is free or in a table of a live sequence, every group known is live. Raises ``AssertionError``."""
        contexts = [*self._prefilling, *(each for group in self._adopted.values() for each in group.contexts)]
        tables = [table for context in contexts for table in context.tables]
        self._pages.allocator.check_integrity(tables + [each.table for each in self._decoding])
        self._prefixes.check_integrity()
        contexts += [each for group in self._waiting for each in group.contexts]
        live = [each.group.spec.group_id for each in contexts] + [each.spec.group_id for each in self._decoding]
        assert sorted(live) == sorted(name for name, count in self._live.items() for _ in range(count))

    def _contexts_of(self, group_id: str) -> list[Context]:
        waiting = [each for group in self._waiting for each in group.contexts]
        adopted = [each for group in self._adopted.values() for each in group.contexts]
        return [each for each in (*waiting, *self._prefilling, *adopted) if each.group.spec.group_id == group_id]

    def _drop(self, context: Context, choices: list[int]) -> None:
        for choice in choices:
            context.choices.remove(choice)
        if not context.choices:
            self._leave(context)
            self._count(context.group.spec.group_id, -1)
        num_needed = min(len(context.tables), context.num_tables if context.choices else 0)
        for table in context.tables[num_needed:]:
            self._pages.allocator.release(table)
        del context.tables[num_needed:]

    def _leave(self, context: Context) -> None:
        """Takes a context out of wherever it stands."""
        group = context.group
        group.contexts.remove(context)
        if context in self._prefilling:
            self._prefilling.remove(context)
        if not group.contexts:
            self._adopted.pop(group.spec.group_id, None)
            if group in self._waiting:
                self._waiting.remove(group)

    def _count(self, group_id: str, change: int) -> None:
        self._live[group_id] += change
        if not self._live[group_id]:
            del self._live[group_id]

    def _pages_for(self, group: Group) -> int:
        return sum(self._pages.pages_to_reserve(*_need(context)) for context in group.contexts)

    def _fits(self, group: Group) -> bool:
        return self._pages_for(group) <= self._pages.allocator.num_free

    def _reserve(self, group: Group) -> None:
        for context in group.contexts:
            known = self._prefixes.find(context.group.spec.salt, context.tokens)
            context.tables = self._pages.reserve(*_need(context), known)
            context.num_cached = context.num_computed = len(known) * self._pages.page_tokens
            context.slots = slots_of(context.tables[0], self._pages.page_tokens)

    def _check(self, group: Group) -> None:
        spec = group.spec
        if spec.group_id in self._live:
            raise Conflict(f"group {spec.group_id} is here already")
        _check_numbers(spec, self._max_context_tokens)
        if self._pages_for(group) > self._pages.allocator.num_pages:
            raise InvalidRequest(
                f"the request needs {self._pages_for(group)} KV pages, the slot has {self._pages.allocator.num_pages}"
            )


def _need(context: Context) -> tuple[int, int, int]:
    return context.num_tokens, context.num_kv_tokens, context.num_tables


def _check_numbers(spec: GroupSpec, max_context_tokens: int) -> None:
    if spec.num_prompt_tokens < 1 or not spec.choices:
        raise InvalidRequest("a group needs a prompt of at least one token, and a choice", field="prompt")
    if len({choice.choice for choice in spec.choices}) < len(spec.choices):
        raise InvalidRequest("a group names each choice once", field="choices")
    if any(len(choice.forced_output) >= spec.sampling.max_tokens for choice in spec.choices):
        raise InvalidRequest("forced_output leaves no token to generate", field="max_tokens")
    if spec.num_prompt_tokens + spec.sampling.max_tokens > max_context_tokens:
        raise ContextLengthExceeded(
            f"{spec.num_prompt_tokens} prompt tokens and {spec.sampling.max_tokens} to generate exceed the context of"
            f" {max_context_tokens} tokens",
            field="max_tokens",
        )

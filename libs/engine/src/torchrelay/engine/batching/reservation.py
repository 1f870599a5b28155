"""Page reservations: all pages that a group can ever need, or no page."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.sequences import PrefillContext, SequenceGroup, slots_of
from torchrelay.engine.batching.validation import check_lengths


class Reservations:
    """Reserves the pages of groups, reusing those of known prefixes."""

    def __init__(self, pages: PageTables, prefixes: PrefixCache, max_context_tokens: int) -> None:
        self._pages = pages
        self._prefixes = prefixes
        self._max_context_tokens = max_context_tokens

    def check(self, group: SequenceGroup) -> None:
        """Raises ``InvalidRequest`` for a group that could never run here."""
        check_lengths(group.spec, self._max_context_tokens)
        if self.pages_for(group.contexts) > self._pages.allocator.num_pages:
            raise InvalidRequest(
                f"the request needs {self.pages_for(group.contexts)} KV pages,"
                f" the slot has {self._pages.allocator.num_pages}"
            )

    def pages_for(self, contexts: Iterable[PrefillContext]) -> int:
        return sum(self._pages.pages_to_reserve(*_need(context)) for context in contexts)

    def could_run_again(self, group: SequenceGroup) -> bool:
        """Whether the pool could hold the rest of the group even if its choices shared no page."""
        if group.on_kv is not None:
            return True  # it never decodes, so it never needs more pages than now
        return group.num_choices * self._pages.pages_for(group.spec.num_kv_tokens) <= self._pages.allocator.num_pages

    def num_pages_lacking(self, group: SequenceGroup) -> int:
        """Pages that must be freed before the group fits; 0 or less if it fits now."""
        return self.pages_for(group.contexts) - self._pages.allocator.num_free

    def reserve(self, group: SequenceGroup) -> None:
        """Takes the pages of a group. Raises ``KvPoolFull``."""
        group.num_pages = self.pages_for(group.contexts)
        for context in group.contexts:
            # The cache has no hidden states, which a prompt needs that runs layer by layer, or whose tokens are scored.
            needs_all = group.by_layer or group.spec.sampling.prompt_logprobs is not None
            tokens = () if needs_all else context.tokens
            known = self._prefixes.find(group.spec.prefix_salt, tokens)
            context.tables = self._pages.reserve(*_need(context), known)
            context.num_cached = context.num_computed = len(known) * self._pages.page_tokens
            context.slots = slots_of(context.tables[0], self._pages.page_tokens)


def _need(context: PrefillContext) -> tuple[int, int, int]:
    return context.num_tokens, context.num_kv_tokens, context.num_tables

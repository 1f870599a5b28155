"""Groups inside an instance: contexts being prefilled, and choices being decoded.

    waiting --pages reserved--> running --last choice finished, handed over--> gone
       ^                         |  ^ |                                         ^
       '-------- preempted ------'  | '--at a layer boundary--> sending --------'
                                    '--all chunks written-- receiving (imported KV, or an imported prefill)

An imported prefill waits for pages like any group; then it is receiving. A cancel or the deadline ends a group in any
state. The scheduler moves groups; every end releases the pages.

Each context of a running group is computed, and then becomes one decode sequence per choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from torchrelay.common.latency.latency_model import StepWork, attended_positions
from torchrelay.engine.core import ChoiceSpec, GrammarState, GroupSpec, KvBlock

Slots = npt.NDArray[np.int64]


def slots_of(table: list[int], page_tokens: int) -> Slots:
    """The slot of every position of a page table."""
    pages = np.asarray(table, dtype=np.int64)
    return (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)


class GroupState(Enum):
    WAITING = auto()  # for pages
    RECEIVING = auto()  # has pages; the results of another worker are arriving
    SENDING = auto()  # has pages, which are being copied to another worker
    RUNNING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrefillContext:
    """A prompt and forced output that one or more choices start with.

    Until the context is computed its tables are interchangeable: they share all full pages, and only the first is
    written.
    """

    group: SequenceGroup
    sequence: int  # its number in the group's KvLayout
    choices: list[int]
    forced: tuple[int, ...]
    begun: frozenset[int] = frozenset()  # choices whose first token was delivered before a preemption
    tables: list[list[int]] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int64))
    num_cached: int = 0  # positions whose KV was cached when the pages were reserved
    num_computed: int = 0  # positions through all layers

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and forced output; empty if its KV is imported."""
        return self.group.spec.prompt + self.forced if self.group.spec.prompt else ()

    @property
    def num_tokens(self) -> int:
        return self.group.spec.num_prompt_tokens + len(self.forced)

    @property
    def num_tables(self) -> int:
        """Tables to reserve: only the context's own if it is handed over, else one per choice."""
        return 1 if self.group.on_kv else len(self.choices)

    @property
    def num_kv_tokens(self) -> int:
        """Positions that each table must hold."""
        return self.num_tokens if self.group.on_kv else self.group.spec.num_kv_tokens

    @property
    def is_live(self) -> bool:
        return self in self.group.contexts


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A choice between two tokens: the KV of the last token of ``output`` is not computed yet."""

    group: SequenceGroup
    choice: int
    table: list[int]
    slots: Slots
    num_computed: int  # positions whose KV is computed
    output: list[int]  # forced tokens included
    counts: Counter[int] | None = None  # of each token of the output so far, if penalties need them
    grammar: GrammarState | None = None  # after the output so far; sampling advances it

    @property
    def spec(self) -> GroupSpec:
        return self.group.spec

    @property
    def next_position(self) -> int:
        return len(self.output)

    @property
    def is_live(self) -> bool:
        return self in self.group.decodings


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """An attempt. With ``on_kv`` its KV is handed over, and it ends with its first tokens."""

    spec: GroupSpec
    on_kv: Callable[[KvBlock], None] | None = None
    on_pages: Callable[[], None] | None = None  # called when it has pages; then it is receiving
    by_layer: bool = False  # its contexts run layer by layer, all positions at once
    layer: int = 0  # the boundary it was imported at, or has reached layer by layer
    state: GroupState = GroupState.WAITING
    num_pages: int = 0  # as reserved
    arrival_order: int = 0
    admission_order: int = 0  # when it got its pages
    was_preempted: bool = False
    contexts: list[PrefillContext] = field(default_factory=list)  # not yet computed
    decodings: list[DecodeSequence] = field(default_factory=list)
    handed_over: set[int] = field(default_factory=set)  # chunks of its KvLayout that the decode worker has

    @classmethod
    def of(
        cls,
        spec: GroupSpec,
        on_kv: Callable[[KvBlock], None] | None = None,
        on_pages: Callable[[], None] | None = None,
    ) -> SequenceGroup:
        group = cls(spec, on_kv, on_pages)
        for sequence, (choices, forced) in enumerate(spec.contexts()):
            group.contexts.append(PrefillContext(group, sequence, list(choices), forced))
        return group

    @property
    def num_choices(self) -> int:
        """Choices that have not ended."""
        return len(self.decodings) + sum(len(context.choices) for context in self.contexts)

    @property
    def can_be_exported(self) -> bool:
        """Whether the whole group is at one layer boundary, with nothing computed beyond."""
        if self.decodings or not self.spec.prompt:
            return False
        is_at_boundary = all(context.num_computed == context.num_cached for context in self.contexts)
        return self.state is GroupState.WAITING or (self.state is GroupState.RUNNING and is_at_boundary)

    def spec_left(self) -> GroupSpec:
        """The group as another instance would start it, with the contexts that are not computed yet."""
        choices = [ChoiceSpec(choice, each.forced) for each in self.contexts for choice in each.choices]
        return replace(self.spec, choices=tuple(choices))

    def contexts_left(self) -> list[PrefillContext]:
        """The contexts to compute if all pages are lost: all output so far becomes forced output."""
        left: dict[tuple[int, ...], PrefillContext] = {}
        for context in self.contexts:
            left[context.forced] = PrefillContext(
                self, context.sequence, list(context.choices), context.forced, context.begun
            )
        for decoding in self.decodings:
            output = tuple(decoding.output)
            context = left.setdefault(output, PrefillContext(self, len(left), [], output))
            context.choices.append(decoding.choice)
            context.begun |= {decoding.choice}
        return list(left.values())


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [begin, end) of a context, to be prefilled in one batch."""

    context: PrefillContext
    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def new_from(self) -> int:
        """The first position whose KV this chunk adds; the first chunk includes what was cached."""
        return 0 if self.begin == self.context.num_cached else self.begin

    @property
    def ends_context(self) -> bool:
        return self.end == self.context.num_tokens

    @property
    def num_scored(self) -> int:
        """The number of its first positions whose next tokens' logprobs are asked for."""
        spec = self.context.group.spec
        if spec.sampling.prompt_logprobs is None or self.context.forced:  # those have been reported before
            return 0
        return max(min(self.end, spec.num_prompt_tokens - 1) - self.begin, 0)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A batch: running choices, the shortest first, then chunks of prompts."""

    decoding: tuple[DecodeSequence, ...]
    chunks: tuple[PrefillChunk, ...]
    layer: int = 0  # the boundary it starts at

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)

    @property
    def work(self) -> StepWork:
        """The work that explains the duration of the step. Read it before the sequences advance."""
        return StepWork(
            num_prefilled=sum(chunk.num_tokens for chunk in self.chunks),
            num_prefill_attended=sum(attended_positions(chunk.begin, chunk.end) for chunk in self.chunks),
            num_decoding=len(self.decoding),
            num_decode_attended=sum(each.num_computed + 1 for each in self.decoding),
        )

    @property
    def chunk_sizes(self) -> list[int]:
        """The rows of each chunk."""
        return [chunk.num_tokens for chunk in self.chunks]

    @property
    def ended_contexts(self) -> tuple[PrefillContext, ...]:
        """The contexts whose last position is in this batch."""
        return tuple(chunk.context for chunk in self.chunks if chunk.ends_context)

    @property
    def contexts_with_tokens(self) -> tuple[PrefillContext, ...]:
        """The ended contexts that are followed by a first token."""
        return tuple(context for context in self.ended_contexts if context.group.spec.pooling is None)

    @property
    def pooled(self) -> Iterator[tuple[int, slice, PrefillContext]]:
        """The contexts that end with an embedding: the place of their last position among the batch's outputs, the rows
        of their chunk, and the context.
        """
        output = row = len(self.decoding)
        for chunk in self.chunks:
            if chunk.ends_context and chunk.context.group.spec.pooling is not None:
                yield output, slice(row, row + chunk.num_tokens), chunk.context
            output += chunk.ends_context
            row += chunk.num_tokens

    @property
    def scored(self) -> Iterator[tuple[PrefillChunk, slice]]:
        """The chunks with positions to score, and the rows of these."""
        row = len(self.decoding)
        for chunk in self.chunks:
            if chunk.num_scored:
                yield chunk, slice(row, row + chunk.num_scored)
            row += chunk.num_tokens

    def live_part(self) -> tuple[BatchPlan, list[int]]:
        """The part of the batch that has not ended meanwhile, and its rows."""
        rows = [row for row, each in enumerate(self.decoding) if each.is_live]
        row = len(self.decoding)
        for chunk in self.chunks:
            rows += range(row, row + chunk.num_tokens) if chunk.context.is_live else ()
            row += chunk.num_tokens
        decoding = tuple(each for each in self.decoding if each.is_live)
        return BatchPlan(decoding, tuple(chunk for chunk in self.chunks if chunk.context.is_live), self.layer), rows

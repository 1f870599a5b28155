"""Groups while they live in an instance: contexts being prefilled, and choices being decoded.

    waiting --pages reserved--> prefilling --last context computed--> decoding --finish--> gone
       |                            |  '--handed over--> gone             |
       '---------- cancel ----------'-------------- cancel ---------------'
    adopted --KV complete, first tokens--> decoding

The scheduler moves them; pages are released on every way out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrelay.engine.core import GroupSpec
from torchrelay.engine.handover import KvBlock

Slots = npt.NDArray[np.int64]


def slots_of(table: list[int], page_tokens: int) -> Slots:
    """The slot of every position that a page table has room for."""
    pages = np.asarray(table, dtype=np.int64)
    return (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)


@dataclass(slots=True, eq=False)
class Context:
    """A prompt and forced output that one or more choices begin with.

    Before it is computed its tables are interchangeable: they share all full pages, and only the first one is written
    to.
    """

    group: Group
    sequence: int  # its number in the group's KvLayout
    choices: list[int]
    tokens: tuple[int, ...]  # empty when adopted
    num_tokens: int
    num_forced: int
    tables: list[list[int]] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int64))
    num_cached: int = 0  # positions whose KV was there when the pages were reserved
    num_computed: int = 0

    @property
    def num_tables(self) -> int:
        """Tables to reserve: one for the context alone when it is handed over."""
        return 1 if self.group.on_kv else len(self.choices)

    @property
    def num_kv_tokens(self) -> int:
        """Positions each table must have room for."""
        return self.num_tokens if self.group.on_kv else self.group.spec.num_kv_tokens


@dataclass(slots=True, eq=False)
class Group:
    """One attempt. ``on_kv`` set: its KV is handed over, and it ends with its first tokens."""

    spec: GroupSpec
    on_kv: Callable[[KvBlock], None] | None
    contexts: list[Context] = field(default_factory=list)  # not yet computed

    @classmethod
    def of(cls, spec: GroupSpec, on_kv: Callable[[KvBlock], None] | None = None) -> Group:
        group = cls(spec, on_kv)
        for sequence, (choices, forced) in enumerate(spec.contexts()):
            num_tokens = spec.num_prompt_tokens + len(forced)
            tokens = spec.prompt + forced if spec.prompt else ()
            group.contexts.append(Context(group, sequence, list(choices), tokens, num_tokens, len(forced)))
        return group


@dataclass(slots=True, eq=False)
class Decoding:
    """One choice between two tokens: ``last_token`` is sampled, but its KV is not computed yet."""

    spec: GroupSpec
    choice: int
    table: list[int]
    slots: Slots
    num_computed: int  # positions whose KV is there
    last_token: int
    next_position: int  # of the output
    counts: Counter[int] | None = None  # of each token of the output so far, where penalties ask for it


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [begin, end) of a context, to be prefilled in one batch."""

    context: Context
    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def new_from(self) -> int:
        """The first position whose KV is there by this chunk: with the first chunk comes what was cached."""
        return 0 if self.begin == self.context.num_cached else self.begin

    @property
    def ends_context(self) -> bool:
        return self.end == self.context.num_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What one batch computes: all running choices, the shortest first, and then chunks of prompts."""

    decoding: tuple[Decoding, ...]
    chunks: tuple[Chunk, ...]

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)

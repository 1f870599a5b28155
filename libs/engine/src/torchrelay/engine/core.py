"""The nouns of the engine. Imports nothing heavy.

A *group* is one attempt at a request: one prompt and one or more *choices* (the ``n`` of the API). Choices with equal
*context* (prompt and forced output) share one prefill and, afterwards, the full pages of that context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from torchrelay.common.errors import Overloaded, Unavailable
from torchrelay.common.latency.latency_model import NO_WORK, StepWork
from torchrelay.common.sampling import SharedSampling
from torchrelay.common.tokens.prefix_hashes import prefix_salt


class KvPoolFull(Overloaded):
    """There are not enough free pages now; retry when other groups have ended."""

    code = "kv_pool_full"


class LoadFailed(Unavailable):
    """The remaining weights will not arrive, so this instance cannot compute any longer."""

    code = "load_failed"


# Below this temperature a distribution is its most likely token, and fp32 could not divide by it.
MIN_TEMPERATURE: Final = 1e-5


class GrammarState(Protocol):
    """The state of a grammar after some output. ``common.tokens.grammar`` implements it."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""

    @property
    def error(self) -> str:
        """The reason why the grammar allows no token; empty if it does."""

    def allowed(self) -> bytes:
        """The mask of the next token, a bit per token, the least significant bit of a byte first; then a bit that
        tells whether the output may end.
        """

    def advance(self, token_id: int) -> None: ...


class Grammar(Protocol):
    """A grammar that the text of an output must follow."""

    @property
    def end_id(self) -> int:
        """The number of tokens, which is also the place of the last bit of ``GrammarState.allowed``."""

    def start(self, output: Sequence[int] = ()) -> GrammarState:
        """The state after ``output``."""


class GroupAdapter(Protocol):
    """The adapter of a group, as the engine of the base model has read it."""

    @property
    def adapter_id(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


class GroupAdapterReader(Protocol):
    """Reads an adapter a part at a time, so that an engine can step between the parts."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the adapter in memory."""

    def read_part(self) -> bool:
        """(engine's thread) Reads the next part; returns whether there are more. Raises ``TorchrelayError``."""

    def read(self) -> GroupAdapter:
        """The adapter, once no part is left."""


@dataclass(frozen=True, slots=True)
class SamplingParams(SharedSampling):
    """How the next token is chosen and when a choice ends; greedy when ``temperature`` is (nearly) 0."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    top_logprobs: int | None = None  # number of top tokens to report beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    seed: int = 0
    max_tokens: int = 16  # per choice, forced output included
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether the next token depends on the tokens of the output."""
        return bool(self.presence_penalty or self.frequency_penalty or self.penalises_prompt)

    @property
    def penalises_prompt(self) -> bool:
        """Whether the next token depends on the distinct tokens of the prompt."""
        return self.repetition_penalty not in (0, 1)

    def finish_of(self, token_id: int, position: int, state: GrammarState | None = None) -> Finish | None:
        """The way in which this token at this output position ends its choice; None: the choice continues.

        ``state``: that of the grammar after the token.
        """
        if token_id in self.stop_token_ids or (state is not None and state.is_complete):
            return Finish.STOP
        return Finish.LENGTH if position + 1 >= self.max_tokens else None


def grammar_state(sampling: SamplingParams, output: Sequence[int]) -> GrammarState | None:
    """The state of the grammar after ``output``; None without a grammar."""
    return None if sampling.grammar is None else sampling.grammar.start(output)


class Pooling(Enum):
    """The hidden states of a prompt, after the final norm, that become its embedding."""

    LAST_TOKEN = "last_token"
    FIRST_TOKEN = "first_token"  # of encoders: [CLS]
    MEAN = "mean"  # of encoders
    SCORE = "score"  # instead of hidden states: the number that a classifier gives for a pair of texts


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """A choice at the start of an attempt; ``forced_output`` is from earlier attempts and is not sampled again."""

    choice: int
    forced_output: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """An attempt. ``prompt`` is empty when KV is imported: the decode side never sees it."""

    group_id: str  # "<request_id>/<attempt>"
    prompt: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    choices: tuple[ChoiceSpec, ...]
    tenant_id: str = ""  # cached prefixes are shared within, and turns taken between, tenants
    deadline_s: float | None = None  # by the instance's clock; the group ends then, without another token
    distinct_prompt_tokens: array[int] = field(default_factory=lambda: array("q"))  # only for a repetition penalty
    pooling: Pooling | None = None  # the group ends with an embedding of its prompt instead of tokens
    second_text: int = 0  # where the second text of a pair begins, by the types of tokens; 0: nowhere
    adapter: GroupAdapter | None = None  # that changes the model for this group; None: the model alone

    @property
    def prefix_salt(self) -> str:
        """The salt of the hashes of its prompt's beginnings."""
        return prefix_salt(self.tenant_id, self.adapter.adapter_id if self.adapter else "")

    def contexts(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """(choices, forced output) of each distinct context, in the order of first appearance, as a hand-over numbers
        them.
        """
        by_output: dict[tuple[int, ...], list[int]] = {}
        for spec in self.choices:
            by_output.setdefault(spec.forced_output, []).append(spec.choice)
        return tuple((tuple(choices), forced) for forced, choices in by_output.items())

    @property
    def num_kv_tokens(self) -> int:
        """Positions of KV that a choice needs to run to its end; the last token needs none."""
        return self.num_prompt_tokens + max(self.num_output_tokens - 1, 0)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that a choice may have, forced output included."""
        return 0 if self.pooling else self.sampling.max_tokens


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    NOT_FINITE = "not_finite"  # the logits had NaN or infinity: nothing was sampled, ``token_id`` is NO_TOKEN
    NO_TOKEN_ALLOWED = "no_token_allowed"  # by the grammar, or by its limits; ``token_id`` is NO_TOKEN


NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the model's probabilities, before temperature, penalties and biases."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True)
class NewToken:
    """A sampled token; ``position`` counts the choice's output from 0, forced tokens included."""

    group_id: str
    choice: int
    position: int
    token_id: int
    finish: Finish | None = None
    num_cached: int = 0  # with the first token: prompt tokens whose KV was cached
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """The pooled hidden states of a group's prompt, with which the group has ended."""

    group_id: str
    values: bytes  # fp32, little-endian; empty: some are NaN or infinite
    num_cached: int  # prompt tokens whose KV was cached


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of successive tokens of a group's prompt, each given the tokens before it."""

    group_id: str
    first_position: int  # of these tokens in the prompt, from 0
    chosen: list[float]  # of the prompt's tokens themselves
    ranks: list[int]  # among all tokens, from 1
    top_token_ids: list[int]  # of each position the same number, most likely first
    top: list[float]


@dataclass(frozen=True, slots=True)
class KvBlock:
    """A finished KV chunk on the prefill side. ``data`` is valid only during the call that receives it: copy it out."""

    group_id: str
    index: int  # in the group's KvLayout
    data: memoryview


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The computed part of a prompt that needs more than one step; ``num_computed`` includes cached tokens."""

    group_id: str
    num_computed: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds of one step by activity; ``kv_transfer_s`` includes imports of KV since the previous step, ``io_wait_s``
    is the time before the step in which prompts waited for weights.
    """

    compute_s: float = 0.0
    memory_s: float = 0.0
    kv_transfer_s: float = 0.0
    io_wait_s: float = 0.0
    scheduling_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.memory_s + self.kv_transfer_s + self.io_wait_s + self.scheduling_s


EMPTY_PROFILE: Final = StepProfile()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step. Decoding a choice counts one position, a prefill chunk one per token."""

    tokens: tuple[NewToken, ...]
    prefilled: tuple[str, ...]  # groups whose last context was prefilled in this step
    num_positions_prefilled: int
    num_positions_decoded: int
    step_s: float
    work: StepWork = NO_WORK
    profile: StepProfile = EMPTY_PROFILE
    expired: tuple[str, ...] = ()  # groups that ended by their deadline
    prompts: tuple[PromptProgress, ...] = ()  # that this step has advanced without ending them
    ran_one_layer: bool = False  # of prompts, which count as prefilled once they end
    embeddings: tuple[Embedding, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_positions_recomputed: int = 0  # of those prefilled: of groups that were preempted


EMPTY_STEP: Final = StepResult((), (), 0, 0, 0.0)

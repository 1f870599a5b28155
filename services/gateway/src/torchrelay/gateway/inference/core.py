"""The nouns of the token path. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from torchrelay.common.errors import TorchrelayError
from torchrelay.control.v1 import generation_pb2, scheduler_pb2
from torchrelay.gateway.core import FinishCause, Principal, PublishedModel

ChatMessage: TypeAlias = dict[str, str]  # "role", "content" and perhaps "name", as a chat template sees it


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What a caller asked for, by whichever door. Exactly one of ``messages``, ``text`` and ``token_ids`` is set."""

    model: str
    messages: tuple[ChatMessage, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    top_logprobs: int | None = None  # likely tokens to tell beside the chosen one; None: not even that one
    seed: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own
    ignore_eos: bool = False

    @property
    def prompt_field(self) -> str:
        """The field an error about the prompt is about."""
        return "prompt" if self.messages is None else "messages"


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request ready to run: the same for all its attempts."""

    request_id: str
    principal: Principal
    model: PublishedModel
    prompt: tuple[int, ...]
    sampling: generation_pb2.Sampling
    num_choices: int
    arrived_unix_us: int  # when its door began with it
    deadline_unix_us: int = 0  # when it ends, done or not; 0: none


@dataclass(frozen=True, slots=True)
class Usage:
    """What a response reports as used, over all choices."""

    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature, penalties and biases.

    Of what cannot be it is -9999, as with OpenAI: JSON has no infinity.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token, its own), the likeliest first


class TokenDelta(msgspec.Struct, frozen=True):
    """Newly accepted tokens of one choice, and how it ended if it did.

    A struct: there is one for every token, and a frozen dataclass takes five times as long to make.
    """

    choice: int
    token_ids: tuple[int, ...]
    finish: FinishCause | None


class LogprobDelta(TokenDelta, frozen=True):
    """The same where logprobs were asked for: one per token."""

    logprobs: tuple[TokenLogprobs, ...]

    @staticmethod
    def told(delivery: TokenDelta) -> tuple[tuple[int, TokenLogprobs], ...]:
        """(token, its logarithms) of a delivery of a request that asked for them."""
        assert isinstance(delivery, LogprobDelta), "every delivery of such a request has them"
        return tuple(zip(delivery.token_ids, delivery.logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to a worker of an attempt broke."""

    attempt: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class AdmissionFailed:
    """The scheduler could not be asked."""

    attempt: int
    error: TorchrelayError


@dataclass(frozen=True, slots=True)
class LedgerOpened:
    """The ledger's opened row is committed, or cannot be (``error``)."""

    error: TorchrelayError | None


@dataclass(frozen=True, slots=True)
class RequestStopped:
    """The request shall end: its client left (``error`` is None), or the gateway cannot go on with it."""

    error: TorchrelayError | None


RequestEvent: TypeAlias = (
    generation_pb2.ChoiceOutput
    | scheduler_pb2.Placement
    | scheduler_pb2.Refusal
    | scheduler_pb2.Waiting
    | WorkerLost
    | AdmissionFailed
    | LedgerOpened
    | RequestStopped
)


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""

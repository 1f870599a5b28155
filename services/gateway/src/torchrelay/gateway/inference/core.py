"""The token path's core types. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.sampling import SharedSampling
from torchrelay.control.v1 import generation_pb2, scheduler_pb2
from torchrelay.gateway.core import FinishCause, Principal, PublishedModel, ServiceClass
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat

# As a chat template sees it: "role", "content" and optionally "name", "tool_calls", "tool_call_id" and
# "reasoning_content".
ChatMessage: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GenerateParams(SharedSampling):
    """A caller's parameters, from REST or gRPC. Exactly one of ``messages``, ``text`` and ``token_ids`` is set."""

    model: str
    messages: tuple[ChatMessage, ...] | None = None
    continues_last: bool = False  # the answer continues the last message, which is the assistant's
    text: str | None = None
    second_text: str | None = None  # of a pair whose first is ``text``
    token_ids: Sequence[int] | None = None
    tools: tuple[dict[str, Any], ...] = ()  # that the answer may call, beside messages
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # more variables for the chat template
    answer_format: AnswerFormat | None = None  # None: that of strict tools, or none
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, addend to its logit)
    top_logprobs: int | None = None  # alternatives to report beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    seed: int | None = None
    num_choices: int = 1
    num_choices_field: str = "n"
    echo: bool = False  # the reply begins with the prompt's text
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own
    ignore_eos: bool = False
    add_special_tokens: bool | None = None  # to a prompt that is not ids; None: if it is text, not messages
    messages_field: str = "messages"
    text_field: str = "prompt"  # the field of ``text`` or ``token_ids``
    service_class: ServiceClass | None = None  # None: the caller's
    left_out: tuple[str, ...] = ()  # kinds of content in whose place the messages have a remark, and of tools

    @property
    def prompt_field(self) -> str:
        """The ``param`` of errors about the prompt."""
        return self.text_field if self.messages is None else self.messages_field


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request ready to run, the same for all its attempts."""

    request_id: str
    principal: Principal
    model: PublishedModel
    prompt: Sequence[int]
    prompt_end: tuple[int, ...]  # its last tokens, on which the text of the answer depends
    sampling: generation_pb2.Sampling
    num_choices: int
    arrived_unix_us: int  # when the server began handling it
    deadline_unix_us: int = 0  # 0: none
    is_callers_deadline: bool = False  # the operator's deadline bills nothing before the first token
    service_class: ServiceClass = ServiceClass.STANDARD
    format_field: str = "tools"  # of the request, that has the format of the answer
    pooling: int = 0  # of the protocol: instead of tokens the prompt's embedding is computed; 0: tokens
    second_text: int = 0  # where the second text of a pair begins, by the tokenizer's types of tokens; 0: nowhere

    @property
    def distinct_prompt_tokens(self) -> Sequence[int]:
        """The prompt's tokens, sorted, if the repetition penalty needs them; otherwise empty."""
        return sorted(set(self.prompt)) if self.sampling.repetition_penalty not in (0, 1) else ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage a response reports, over all choices."""

    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int | None = None  # of these; None for a model that shows no reasoning


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature, penalties and biases.

    -9999 for impossible tokens, as in OpenAI's API: JSON has no infinity.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), most likely first


class TokenDelta(msgspec.Struct, frozen=True):
    """Newly accepted tokens of one choice, and why it finished, if it did."""

    # A msgspec.Struct, because a delta is created per token, and a frozen dataclass takes five times as long.

    choice: int
    token_ids: tuple[int, ...]
    finish: FinishCause | None


class LogprobDelta(TokenDelta, frozen=True):
    """A delta with one ``TokenLogprobs`` per token, where logprobs were requested."""

    logprobs: tuple[TokenLogprobs, ...]

    @staticmethod
    def pairs(delta: TokenDelta) -> tuple[tuple[int, TokenLogprobs], ...]:
        """(token, logprobs) of a delta of a request with logprobs."""
        assert isinstance(delta, LogprobDelta), "every delta of such a request has logprobs"
        return tuple(zip(delta.token_ids, delta.logprobs, strict=True))


class EmbeddingDelta(TokenDelta, frozen=True):
    """The embedding of the prompt, and with it the end of the request."""

    values: bytes  # fp32, little-endian


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to a worker of an attempt broke."""

    attempt: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class AdmissionFailed:
    """The scheduler was unreachable."""

    attempt: int
    error: TorchrelayError


RequestEvent: TypeAlias = (
    generation_pb2.ChoiceOutput
    | scheduler_pb2.Placement
    | scheduler_pb2.Refusal
    | scheduler_pb2.Recall
    | WorkerLost
    | AdmissionFailed
)


class ClientDisconnected(Exception):
    """The client of a request has disconnected."""

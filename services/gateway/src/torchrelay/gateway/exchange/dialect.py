"""The interface of a dialect of the token paths: to read a body, and to write answers and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.inference.choice_reader import ChoiceReader
from torchrelay.gateway.inference.core import GenerateParams, TokenDelta, Usage
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.limits.shares import ShareAccount


class StreamEncoder(Protocol):
    """Writes the events of a streamed answer."""

    choices: tuple[ChoiceReader, ...]

    def keep_alive(self) -> bytes: ...

    def of(self, deltas: Iterable[TokenDelta]) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def failed(self, error: TorchrelayError) -> bytes:
        """The last events of a stream that fails."""
        ...


class Replies(Protocol):
    """Writes the answer to a call, in the form that its body asks for."""

    def encoder(self, session: RequestSession, reply_id: str, first_index: int, held: ShareAccount) -> StreamEncoder:
        """The encoder of the events of a prompt's answer. ``first_index``: of its first choice. ``held`` counts what is
        kept of the answer.
        """
        ...

    async def whole(self, sessions: Sequence[RequestSession], held: ShareAccount) -> bytes:
        """Reads the answer to each prompt to its end; returns the JSON of all."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A decoded body: the prompts, each of which is a request of its own, and how they are answered.

    ``num_held_bytes``: the bytes of the body that the answer repeats.
    """

    prompts: list[GenerateParams]
    is_stream: bool
    replies: Replies
    num_held_bytes: int = 0


class Dialect(Protocol):
    """A dialect. ``id_headers``: the headers of an answer that name the request."""

    id_headers: Sequence[bytes]

    def new_id(self) -> str:
        """An id for a request."""
        ...

    def decode(self, encoded: bytearray, path: str) -> Call:
        """Raises ``InvalidRequest`` naming the field."""
        ...

    def error_body(self, error: TorchrelayError, request_id: str) -> Any:
        """The JSON of an error."""
        ...


def total_usage(usages: Sequence[Usage]) -> Usage:
    if len(usages) == 1:
        return usages[0]
    return Usage(
        sum(usage.num_prompt_tokens for usage in usages),
        sum(usage.num_cached_prompt_tokens for usage in usages),
        sum(usage.num_output_tokens for usage in usages),
    )

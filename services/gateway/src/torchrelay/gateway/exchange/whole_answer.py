"""A whole answer to a prompt, which is not streamed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.exchange.logprobs import EncodedLogprobs, LogprobFormatter
from torchrelay.gateway.inference.answers.parts import Part
from torchrelay.gateway.inference.core import Usage
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.limits.shares import ShareAccount


@dataclass(slots=True)
class ChoiceBuffer:
    """A choice, as it accumulates."""

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: FinishCause | None = None
    stop_string: str = ""  # that ended it; empty: none
    logprobs: list[EncodedLogprobs] = field(default_factory=list)  # of each token, if requested
    logprob_sum: float = 0.0
    num_parts: list[int] = field(default_factory=list)  # after each of these

    def mean_logprob(self) -> float:
        return self.logprob_sum / max(1, len(self.logprobs))


async def read_whole(
    session: RequestSession, logprobs: LogprobFormatter | None, held: ShareAccount
) -> tuple[list[ChoiceBuffer], Usage]:
    """The choices of a prompt and its usage, once its request is settled. ``held`` counts what may be many times the
    answer's text.
    """
    request, readers = session.request, session.choices()
    request.is_read_whole = True
    held.take(len(session.echo.encode()) * len(session.texts))
    choices = [ChoiceBuffer([session.echo] if session.echo else []) for _ in readers]
    while not request.is_finished:
        for delta in await request.next():
            choice = choices[delta.choice]
            choice.token_ids += delta.token_ids
            choice.finish = delta.finish or choice.finish
            for step in readers[delta.choice].read(delta):
                choice.parts += step.parts
                if logprobs is not None and step.scored is not None:
                    choice.logprobs.append(logprobs.encoded(step.scored))
                    choice.logprob_sum += step.scored.logprobs.chosen
                    held.take(sum(map(len, choice.logprobs[-1])))
                    choice.num_parts.append(len(choice.parts))
    for choice, reader in zip(choices, readers, strict=True):
        choice.stop_string = reader.stop_string
    await request.settled(SETTLE_TIMEOUT_S)
    return choices, session.usage(readers)

"""The attempts of a role, and the conversion of engine tokens into outputs for their gateways."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.sampling import shared_sampling
from torchrelay.common.tokens.grammar import Grammar
from torchrelay.common.tokens.stop_strings import StopChecker
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.core import (
    ChoiceSpec,
    Embedding,
    Finish,
    GroupAdapter,
    GroupSpec,
    Logprobs,
    NewToken,
    Pooling,
    PromptLogprobs,
    PromptProgress,
    SamplingParams,
)
from torchrelay.worker.attempts.outbox import Outbox

FINISH_REASONS = {
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_POOLINGS = {
    types_pb2.POOLING_UNSPECIFIED: None,
    types_pb2.POOLING_LAST_TOKEN: Pooling.LAST_TOKEN,
    types_pb2.POOLING_FIRST_TOKEN: Pooling.FIRST_TOKEN,
    types_pb2.POOLING_MEAN: Pooling.MEAN,
    types_pb2.POOLING_SCORE: Pooling.SCORE,
}
DEADLINE_ERROR = pb.RunError(code=pb.RunError.CODE_DEADLINE, message="the request's deadline passed")


def group_id_of(key: types_pb2.AttemptKey) -> str:
    """The engine's id of an attempt, and the id of its KV buffer."""
    return f"{key.request_id}/{key.attempt}"


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt in one role. ``open_choices`` shrinks as choices finish."""

    start: pb.AttemptStart
    outbox: Outbox
    stops: dict[int, StopChecker]
    grammar: Grammar | None = None
    adapter: GroupAdapter | None = None
    began_us: int = field(default_factory=now_unix_us)
    open_choices: set[int] = field(default_factory=set)
    phases: list[types_pb2.Phase] = field(default_factory=list)
    deadline: asyncio.TimerHandle | None = None
    is_started: bool = False  # its stop checkers are in place; tokens may arrive
    _num_forced: dict[int, int] = field(init=False)  # by choice

    def __post_init__(self) -> None:
        self._num_forced = {choice.choice: len(choice.forced_output) for choice in self.start.choices}
        self.open_choices = set(self._num_forced)

    @property
    def group_id(self) -> str:
        return group_id_of(self.start.key)

    def group(self) -> GroupSpec:
        """The engine's view of the attempt. Raises ``InvalidRequest`` for a pooling that this worker does not know."""
        sampling = self.start.sampling
        if self.start.pooling not in _POOLINGS:
            raise InvalidRequest(f"this worker does not know pooling {self.start.pooling}", field="pooling")
        return GroupSpec(
            group_id=self.group_id,
            prompt=tuple(self.start.prompt),
            num_prompt_tokens=self.start.num_prompt_tokens,
            sampling=SamplingParams(
                **shared_sampling(sampling),
                logit_bias=tuple(sorted(sampling.logit_bias.items())),
                top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
                prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
                seed=sampling.seed,
                max_tokens=sampling.max_tokens,
                stop_token_ids=frozenset(sampling.stop_token_ids),
                grammar=self.grammar,
            ),
            choices=tuple(ChoiceSpec(c.choice, tuple(c.forced_output)) for c in self.start.choices),
            tenant_id=self.start.tenant_id,
            deadline_s=None if (left_s := self.left_s()) is None else time.monotonic() + left_s,
            distinct_prompt_tokens=array("q", self.start.distinct_prompt_tokens),
            pooling=_POOLINGS[self.start.pooling],
            second_text=self.start.second_text,
            adapter=self.adapter,
        )

    def left_s(self) -> float | None:
        """Seconds to the deadline, negative once it has passed; None without a deadline."""
        if not self.start.deadline_unix_ms:
            return None
        return self.start.deadline_unix_ms / 1000 - time.time()

    def finish_of(self, token: NewToken) -> Finish | None:
        """The way in which ``token`` ends its choice: by a stop string, or as the engine reports.

        None: it continues.
        """
        checker = self.stops.get(token.choice)
        stopped = checker.step(token.token_id) if checker else False
        return Finish.STOP if stopped else token.finish

    def num_forced(self, choice: int) -> int:
        """Forced output tokens of the choice, which is also the position of its first new token."""
        return self._num_forced[choice]

    def output(self, token: NewToken, finish: Finish | None) -> pb.ChoiceOutput:
        """The message for a new token, with the phases measured since the last message."""
        phases, self.phases = self.phases, []
        return pb.ChoiceOutput(
            key=self.start.key,
            choice=token.choice,
            first_position=token.position,
            token_ids=[token.token_id],
            finish_reason=FINISH_REASONS[finish] if finish else pb.FINISH_REASON_UNSPECIFIED,
            num_cached_prompt_tokens=token.num_cached,
            phases=phases,
            logprobs=[_logprobs_to_proto(token.logprobs)] if token.logprobs else [],
        )

    def embedding_output(self, embedding: Embedding) -> pb.ChoiceOutput:
        """The message that ends the attempt with its embedding."""
        (choice,) = self.open_choices
        phases, self.phases = self.phases, []
        return pb.ChoiceOutput(
            key=self.start.key,
            choice=choice,
            finish_reason=pb.FINISH_REASON_STOP,
            num_prompt_tokens=self.start.num_prompt_tokens,
            num_cached_prompt_tokens=embedding.num_cached,
            phases=phases,
            embedding=embedding.values,
        )

    def prompt_output(self, progress: PromptProgress) -> pb.ChoiceOutput:
        """The message that reports the computed part of the prompt before there is a token."""
        choice = min(self.open_choices)
        return pb.ChoiceOutput(
            key=self.start.key,
            choice=choice,
            first_position=self.num_forced(choice),
            num_prompt_tokens=progress.num_computed,
            num_cached_prompt_tokens=min(progress.num_cached, progress.num_computed),
        )

    def prompt_logprobs_output(self, scores: PromptLogprobs) -> pb.ChoiceOutput:
        """The message with logprobs of a part of the prompt."""
        choice = min(self.open_choices)
        return pb.ChoiceOutput(
            key=self.start.key,
            choice=choice,
            first_position=self.num_forced(choice),
            prompt_logprobs=pb.PromptLogprobs(
                first_position=scores.first_position,
                chosen=scores.chosen,
                ranks=scores.ranks,
                top_token_ids=scores.top_token_ids,
                top_logprobs=scores.top,
            ),
        )

    def failure(self, error: pb.RunError) -> list[pb.ChoiceOutput]:
        """The messages that end the open choices with an error."""
        return [
            pb.ChoiceOutput(key=self.start.key, choice=choice, finish_reason=pb.FINISH_REASON_ERROR, error=error)
            for choice in sorted(self.open_choices)
        ]


def no_token_error(token: NewToken) -> pb.RunError:
    """The error of an attempt for which no token can be sampled."""
    if token.finish is Finish.NOT_FINITE:
        message = (
            f"the model's logits are not finite (NaN or infinity) at output position {token.position}: they overflow"
            " with this prompt, and no token can be sampled"
        )
        return pb.RunError(code=pb.RunError.CODE_INTERNAL, message=message)
    message = (
        f"the format that the answer must follow allows no token at output position {token.position}: it is too"
        " complex, or the model's tokens cannot spell what must come next; simplify it"
    )
    return pb.RunError(code=pb.RunError.CODE_FORMAT, message=message)


NON_FINITE_EMBEDDING_ERROR = pb.RunError(
    code=pb.RunError.CODE_INTERNAL,
    message="the model's hidden states are not finite (NaN or infinity): they overflow with this input",
)


def _logprobs_to_proto(logprobs: Logprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=logprobs.chosen,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[value for _, value in logprobs.top],
    )


def dispatch_outputs(outputs: Iterable[tuple[Outbox, pb.ChoiceOutput]]) -> None:
    """Puts each output into its gateway's outbox: one message per gateway and engine step."""
    by_outbox: dict[Outbox, list[pb.ChoiceOutput]] = defaultdict(list)
    for outbox, output in outputs:
        by_outbox[outbox].append(output)
    for outbox, batch in by_outbox.items():
        outbox.put(batch)

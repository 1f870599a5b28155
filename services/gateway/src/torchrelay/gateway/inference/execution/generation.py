"""Merges the outputs of several attempts into the tokens of one request. Pure: no clocks, no streams.

Every token carries (attempt, position). A choice belongs to one attempt at a time and accepts only the next expected
position from that attempt. Its first token comes from the prefill worker, the others from the decode worker over
another stream; tokens that arrive early are held until the gap closes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.common.errors import TorchrelayError
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.inference.core import EmbeddingDelta, LogprobDelta, TokenDelta, TokenLogprobs, Usage

FIRST_ATTEMPT = 1
LEAST_LOGPROB = -9999.0
_FIRST_LIMIT = 512  # output tokens of a first attempt
_LIMIT_GROWTH = 4
_LEAST_EXTENSION = 32  # output tokens for which another attempt is worth its while
_CAUSES = {pb.FINISH_REASON_STOP: FinishCause.STOP, pb.FINISH_REASON_LENGTH: FinishCause.LENGTH}


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """An attempt to be admitted: its choices, and the forced output tokens of each."""

    attempt: int
    forced: dict[int, tuple[int, ...]]
    max_tokens: int  # per choice, forced ones included

    @property
    def num_forced_tokens(self) -> int:
        """The largest number of forced tokens of any choice."""
        return max(map(len, self.forced.values()))


def attempt_limit(num_tokens: int, max_tokens: int) -> int:
    """The most tokens of an attempt at an answer that has ``num_tokens`` and may have ``max_tokens``.

    Workers keep KV for an attempt's last token from its beginning. Since few answers are as long as they may be, an
    attempt gets a part of ``max_tokens``, and an answer that reaches it goes on in another attempt.
    """
    limit = _FIRST_LIMIT
    while limit <= num_tokens:
        limit *= _LIMIT_GROWTH
    return max_tokens if max_tokens <= 2 * limit else limit


@dataclass(slots=True)
class ChoiceProgress:
    """A choice: the tokens accepted so far, and its current attempt."""

    choice: int
    attempt: int
    limit: int  # tokens at which it ends
    num_attempts: int = 1
    tokens: list[int] = field(default_factory=list)
    num_forced: int = 0  # tokens the current attempt started with
    finish: FinishCause | None = None
    early: dict[int, tuple[list[int], FinishCause | None]] = field(default_factory=dict)  # by position


class Generation:
    """The accepted tokens of all choices of one request."""

    _least_limit = 1  # where no token may follow the prompt, workers sample a token that is not accepted

    def __init__(self, num_choices: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._last_attempt = FIRST_ATTEMPT
        self._num_cached: int | None = None
        self._num_prompt = 0  # tokens of a long prompt computed or found cached before the first token
        self._num_found = 0  # those of them that were cached
        self._at_limit: list[int] = []  # choices at the limit of their attempt, which may have more tokens
        self._extensions: set[int] = set()  # attempts that continue a choice beyond the limit of its last
        limit = attempt_limit(0, max_tokens)
        self.choices = [ChoiceProgress(choice, FIRST_ATTEMPT, limit) for choice in range(num_choices)]

    @property
    def is_finished(self) -> bool:
        return all(progress.finish for progress in self.choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(progress.tokens) for progress in self.choices)

    def first(self) -> AttemptPlan:
        """The initial attempt: all choices, nothing forced."""
        return self._plan(FIRST_ATTEMPT, self.choices)

    def _plan(self, attempt: int, choices: list[ChoiceProgress], limit: int | None = None) -> AttemptPlan:
        forced = {progress.choice: tuple(progress.tokens) for progress in choices}
        limit = limit or max(attempt_limit(max(map(len, forced.values())), self._max_tokens), self._least_limit)
        for progress in choices:
            progress.limit = limit
        return AttemptPlan(attempt, forced, limit)

    def carries(self, attempt: int, choice: int) -> bool:
        """Whether ``choice`` still expects tokens from ``attempt``."""
        return self._carried(attempt, choice) is not None

    def _carried(self, attempt: int, choice: int) -> ChoiceProgress | None:
        if choice >= len(self.choices):
            return None
        progress = self.choices[choice]
        return progress if progress.attempt == attempt and progress.finish is None else None

    def is_over(self, attempt: int) -> bool:
        """Whether no choice expects tokens from ``attempt`` any more."""
        return not self._carried_by(attempt)

    def _carried_by(self, attempt: int) -> list[ChoiceProgress]:
        return [progress for progress in self.choices if self.carries(attempt, progress.choice)]

    def has_prefilled(self, attempt: int) -> bool:
        """Whether every choice of ``attempt`` has its first new token, the last one from the prefill worker."""
        return all(len(choice.tokens) > choice.num_forced for choice in self._carried_by(attempt))

    def accept(self, output: pb.ChoiceOutput) -> TokenDelta | None:
        """The tokens ``output`` adds, including early ones it connects; None if it adds nothing."""
        progress = self._carried(output.key.attempt, output.choice)
        if progress is None:
            return None
        tokens, position, num_before = output.token_ids[:], output.first_position, len(progress.tokens)
        if self._num_cached is None and position == progress.num_forced:  # only prefill reports it
            self._num_cached = output.num_cached_prompt_tokens
        reason = output.finish_reason
        cause = _CAUSES.get(reason) if reason else None
        if position == num_before and not progress.early and num_before + len(tokens) < self._max_tokens:
            progress.tokens += tokens  # the path of nearly every token
            progress.finish = self._finish(progress, cause) if cause else None
            return TokenDelta(progress.choice, tuple(tokens), progress.finish) if tokens or cause else None
        if position > num_before:
            if position <= self._max_tokens:
                progress.early[position] = (tokens, cause)
            return None
        self._append(progress, position, tokens, cause)
        while progress.early and (first := min(progress.early)) <= len(progress.tokens) and progress.finish is None:
            self._append(progress, first, *progress.early.pop(first))
        added = progress.tokens[num_before:]
        return TokenDelta(progress.choice, tuple(added), progress.finish) if added or progress.finish else None

    def advance_prompt(self, output: pb.ChoiceOutput) -> None:
        """Notes how much of a long prompt is computed; ``output`` has no tokens."""
        if self.carries(output.key.attempt, output.choice):
            self._num_prompt = max(self._num_prompt, output.num_prompt_tokens)
            self._num_found = max(self._num_found, output.num_cached_prompt_tokens)

    def _append(self, progress: ChoiceProgress, position: int, tokens: list[int], cause: FinishCause | None) -> None:
        num_known = len(progress.tokens) - position
        if num_known > len(tokens) or not (tokens[num_known:] or cause):
            return
        progress.tokens += tokens[num_known:]
        if (num_beyond := len(progress.tokens) - self._max_tokens) >= 0:
            del progress.tokens[self._max_tokens :]
            progress.finish = FinishCause.LENGTH if num_beyond or cause is None else cause
        else:
            progress.finish = self._finish(progress, cause)

    def _finish(self, progress: ChoiceProgress, cause: FinishCause | None) -> FinishCause | None:
        """The cause of the choice's end; None if only its attempt has ended, at its limit."""
        if cause is FinishCause.LENGTH and len(progress.tokens) >= progress.limit:
            self._at_limit.append(progress.choice)
            return None
        return cause

    def resume(self, attempt: int, *, is_excused: bool = False) -> list[AttemptPlan]:
        """The attempts that take over from ``attempt``, which failed, or ended without a failure of its own.

        Choices with tokens each get their own attempt, because their contexts differ; those without share one. Finished
        choices are not resumed.
        """
        plans: list[AttemptPlan] = []
        fresh: list[ChoiceProgress] = []
        for progress in self._carried_by(attempt):
            self._restart(progress)
            progress.num_attempts += not is_excused
            if progress.tokens:
                plans.append(self._take_over([progress]))
                if is_excused and attempt in self._extensions:
                    self._extensions.add(self._last_attempt)
            else:
                fresh.append(progress)
        if fresh:
            plans.append(self._take_over(fresh))
        return plans

    def extend(self) -> list[AttemptPlan]:
        """The attempts that continue the choices at the limits of theirs."""
        plans: list[AttemptPlan] = []
        while self._at_limit:
            progress = self.choices[self._at_limit.pop()]
            self._restart(progress)
            plans.append(self._take_over([progress]))
            self._extensions.add(self._last_attempt)
        return plans

    def shorten(self, attempt: int) -> tuple[list[AttemptPlan], list[TokenDelta]]:
        """Continues a choice although no worker has the KV for its attempt, which ``extend`` gave.

        Returns an attempt with half of its tokens, or the end of the choice if these are few; nothing for an attempt
        that ``extend`` did not give.
        """
        if attempt not in self._extensions:
            return [], []
        self._extensions.discard(attempt)
        [progress] = self._carried_by(attempt)
        more = (progress.limit - len(progress.tokens)) // 2
        if more < _LEAST_EXTENSION:
            progress.finish = FinishCause.LENGTH
            return [], [self._ending(progress)]
        plan = self._take_over([progress], len(progress.tokens) + more)
        self._extensions.add(plan.attempt)
        return [plan], []

    def _ending(self, progress: ChoiceProgress) -> TokenDelta:
        return TokenDelta(progress.choice, (), progress.finish)

    def _take_over(self, choices: list[ChoiceProgress], limit: int | None = None) -> AttemptPlan:
        self._last_attempt += 1
        for progress in choices:
            progress.attempt = self._last_attempt
        return self._plan(self._last_attempt, choices, limit)

    def _restart(self, progress: ChoiceProgress) -> None:
        """Continues the choice after the accepted tokens in another attempt, which computes early tokens again."""
        progress.early.clear()
        progress.num_forced = len(progress.tokens)

    def num_attempts(self, attempt: int) -> int:
        """How often the choices of ``attempt`` have been placed, without excused attempts, including this one."""
        return max((c.num_attempts for c in self.choices if c.attempt == attempt), default=0)

    @property
    def has_output(self) -> bool:
        """Whether anything was accepted that only a computed prompt gives."""
        return self.num_output_tokens > 0 or self.is_finished

    @property
    def _num_cached_so_far(self) -> int:
        return self._num_found if self._num_cached is None else self._num_cached

    def usage(self, num_prompt_tokens: int) -> Usage:
        return Usage(num_prompt_tokens, self._num_cached_so_far, self.num_output_tokens)

    def settlement(
        self, request_id: str, num_prompt_tokens: int, unfinished: FinishCause, *, by_caller: bool
    ) -> list[ChoiceUsage]:
        """The accepted usage per choice; ``unfinished`` is the cause for choices that have not finished.

        Before the first output only a request that its caller ended is billed: for the part of its prompt that was
        computed.
        """
        if not self.has_output:
            num_prompt_tokens = min(self._num_prompt, num_prompt_tokens) if by_caller else 0
        return [
            ChoiceUsage(
                request_id=request_id,
                choice=progress.choice,
                num_prompt_tokens=num_prompt_tokens,
                num_cached_prompt_tokens=min(self._num_cached_so_far, num_prompt_tokens),
                num_output_tokens=len(progress.tokens),
                cause=progress.finish or unfinished,
            )
            for progress in self.choices
        ]


class LogprobGeneration(Generation):
    """A generation with logprobs, which are held by position until their token is accepted.

    A separate class, so that requests without logprobs pay nothing per token.
    """

    def __init__(self, num_choices: int, max_tokens: int) -> None:
        super().__init__(num_choices, max_tokens)
        self._waiting: list[dict[int, TokenLogprobs]] = [{} for _ in range(num_choices)]

    def accept(self, output: pb.ChoiceOutput) -> LogprobDelta | None:
        """Raises ``TorchrelayError`` if the output lacks logprobs."""
        if not self.carries(output.key.attempt, output.choice):
            return None
        if len(output.logprobs) != len(output.token_ids):
            raise TorchrelayError("the worker returned no logprobs although they were requested")
        tokens, waiting = self.choices[output.choice].tokens, self._waiting[output.choice]
        for position, logprobs in enumerate(output.logprobs, output.first_position):
            if len(tokens) <= position < self._max_tokens:
                waiting[position] = _logprobs(logprobs)
        num_before = len(tokens)
        delta = super().accept(output)
        if delta is None:
            return None
        accepted = tuple(waiting.pop(position) for position in range(num_before, len(tokens)))
        return LogprobDelta(delta.choice, delta.token_ids, delta.finish, accepted)

    def _ending(self, progress: ChoiceProgress) -> LogprobDelta:
        return LogprobDelta(progress.choice, (), progress.finish, ())

    def _restart(self, progress: ChoiceProgress) -> None:
        self._waiting[progress.choice].clear()
        super()._restart(progress)


class EmbeddingGeneration(Generation):
    """A generation that ends with the embedding of the prompt instead of tokens."""

    _least_limit = 0

    def __init__(self) -> None:
        super().__init__(num_choices=1, max_tokens=0)

    def accept(self, output: pb.ChoiceOutput) -> EmbeddingDelta | None:
        """Raises ``TorchrelayError`` if the output has tokens or an end instead of an embedding."""
        progress = self._carried(output.key.attempt, output.choice)
        if progress is None:
            return None
        if not output.embedding:
            if output.token_ids or output.finish_reason:
                raise TorchrelayError("the worker returned no embedding although it was requested")
            return None
        self._num_cached = output.num_cached_prompt_tokens
        progress.finish = FinishCause.STOP
        return EmbeddingDelta(progress.choice, (), progress.finish, output.embedding)


def _logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = zip(message.top_token_ids, message.top_logprobs, strict=False)
    return TokenLogprobs(
        max(message.chosen, LEAST_LOGPROB), tuple((token, max(value, LEAST_LOGPROB)) for token, value in top)
    )

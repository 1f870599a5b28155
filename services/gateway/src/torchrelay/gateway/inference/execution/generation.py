"""How outputs of several attempts become the tokens of one request: pure, no clocks, no streams.

Every token carries (attempt, position). A choice belongs to one attempt at a time and accepts exactly the position it
expects next from exactly that attempt. Its first token comes from the prefill worker and the others from the decode
worker, over different streams: what arrives too early is kept until the gap closes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.common.errors import TorchrelayError
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.inference.core import LogprobDelta, TokenDelta, TokenLogprobs, Usage

FIRST_ATTEMPT = 1
LEAST_LOGPROB = -9999.0
_CAUSES = {pb.FINISH_REASON_STOP: FinishCause.STOP, pb.FINISH_REASON_LENGTH: FinishCause.LENGTH}


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """One attempt to be admitted: which choices it carries, and the tokens each brings along."""

    attempt: int
    forced: dict[int, tuple[int, ...]]

    @property
    def num_forced_tokens(self) -> int:
        """The most tokens any choice brings along."""
        return max(map(len, self.forced.values()))


@dataclass(slots=True)
class ChoiceProgress:
    """One choice: the tokens accepted so far, and the attempt that carries it now."""

    choice: int
    attempt: int
    num_attempts: int = 1
    tokens: list[int] = field(default_factory=list)
    num_forced: int = 0  # tokens the current attempt began with
    finish: FinishCause | None = None
    early: dict[int, tuple[list[int], FinishCause | None]] = field(default_factory=dict)  # by position


class Generation:
    """The accepted tokens of all choices of one request."""

    def __init__(self, num_choices: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._last_attempt = FIRST_ATTEMPT
        self._num_cached: int | None = None
        self.choices = [ChoiceProgress(choice, attempt=FIRST_ATTEMPT) for choice in range(num_choices)]

    @property
    def is_finished(self) -> bool:
        return all(progress.finish for progress in self.choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(progress.tokens) for progress in self.choices)

    def first(self) -> AttemptPlan:
        """The attempt every request begins with: all choices, nothing forced."""
        return AttemptPlan(FIRST_ATTEMPT, {progress.choice: () for progress in self.choices})

    def carries(self, attempt: int, choice: int) -> bool:
        """Whether ``choice`` still waits for tokens of ``attempt``."""
        return self._carried(attempt, choice) is not None

    def _carried(self, attempt: int, choice: int) -> ChoiceProgress | None:
        if choice >= len(self.choices):
            return None
        progress = self.choices[choice]
        return progress if progress.attempt == attempt and progress.finish is None else None

    def is_over(self, attempt: int) -> bool:
        """Whether no choice waits for tokens of ``attempt`` any more."""
        return not any(self.carries(attempt, progress.choice) for progress in self.choices)

    def has_prefilled(self, attempt: int) -> bool:
        """Whether every choice of ``attempt`` has its first new token: nothing more comes from the prefill worker."""
        return all(len(one.tokens) > one.num_forced for one in self.choices if self.carries(attempt, one.choice))

    def accept(self, output: pb.ChoiceOutput) -> TokenDelta | None:
        """The tokens that ``output`` adds, with those it makes room for; None when it adds nothing."""
        progress = self._carried(output.key.attempt, output.choice)
        if progress is None:
            return None
        tokens, position, num_before = output.token_ids[:], output.first_position, len(progress.tokens)
        if self._num_cached is None and position == progress.num_forced:  # only prefill knows
            self._num_cached = output.num_cached_prompt_tokens
        reason = output.finish_reason
        cause = _CAUSES.get(reason) if reason else None
        if position == num_before and not progress.early and num_before + len(tokens) < self._max_tokens:
            progress.tokens += tokens  # as nearly every token comes
            progress.finish = cause
            return TokenDelta(progress.choice, tuple(tokens), cause) if tokens or cause else None
        if position > num_before:
            if position <= self._max_tokens:
                progress.early[position] = (tokens, cause)
            return None
        self._append(progress, position, tokens, cause)
        while progress.early and (first := min(progress.early)) <= len(progress.tokens) and progress.finish is None:
            self._append(progress, first, *progress.early.pop(first))
        added = progress.tokens[num_before:]
        return TokenDelta(progress.choice, tuple(added), progress.finish) if added or progress.finish else None

    def _append(self, progress: ChoiceProgress, position: int, tokens: list[int], cause: FinishCause | None) -> None:
        num_known = len(progress.tokens) - position
        if num_known > len(tokens):
            return
        progress.tokens += tokens[num_known:]
        progress.finish = cause
        if len(progress.tokens) >= self._max_tokens:
            del progress.tokens[self._max_tokens :]
            progress.finish = cause or FinishCause.LENGTH

    def resume(self, attempt: int) -> list[AttemptPlan]:
        """The attempts that take over from ``attempt``, which failed.

        Each choice with tokens gets an attempt of its own, for contexts now differ; those without share one. Finished
        choices are left alone.
        """
        plans: list[AttemptPlan] = []
        fresh: list[ChoiceProgress] = []
        for progress in self.choices:
            if self.carries(attempt, progress.choice):
                progress.early.clear()
                progress.num_attempts += 1
                progress.num_forced = len(progress.tokens)
                if progress.tokens:
                    plans.append(self._take_over([progress]))
                else:
                    fresh.append(progress)
        if fresh:
            plans.append(self._take_over(fresh))
        return plans

    def _take_over(self, choices: list[ChoiceProgress]) -> AttemptPlan:
        self._last_attempt += 1
        for progress in choices:
            progress.attempt = self._last_attempt
        return AttemptPlan(self._last_attempt, {one.choice: tuple(one.tokens) for one in choices})

    def num_attempts(self, attempt: int) -> int:
        """How often the choices of ``attempt`` have been placed, this attempt included."""
        return max((one.num_attempts for one in self.choices if one.attempt == attempt), default=0)

    def usage(self, num_prompt_tokens: int) -> Usage:
        return Usage(num_prompt_tokens, self._num_cached or 0, self.num_output_tokens)

    def settlement(self, request_id: str, num_prompt_tokens: int, unfinished: FinishCause) -> list[ChoiceUsage]:
        """What the ledger gets: the accepted tokens of each choice; ``unfinished`` is why the open ones end here."""
        return [
            ChoiceUsage(
                request_id=request_id,
                choice=progress.choice,
                num_prompt_tokens=num_prompt_tokens,
                num_cached_prompt_tokens=self._num_cached or 0,
                num_output_tokens=len(progress.tokens),
                cause=progress.finish or unfinished,
            )
            for progress in self.choices
        ]


class LogprobGeneration(Generation):
    """The same for a request that asked for logprobs. They wait by position until their token is accepted.

    A class of its own, so that who does not ask pays nothing for them at any token.
    """

    def __init__(self, num_choices: int, max_tokens: int) -> None:
        super().__init__(num_choices, max_tokens)
        self._waiting: list[dict[int, TokenLogprobs]] = [{} for _ in range(num_choices)]

    def accept(self, output: pb.ChoiceOutput) -> LogprobDelta | None:
        """Raises ``TorchrelayError`` when the output lacks them."""
        if not self.carries(output.key.attempt, output.choice):
            return None
        if len(output.logprobs) != len(output.token_ids):
            raise TorchrelayError("the worker left out logprobs that were asked for")
        tokens, waiting = self.choices[output.choice].tokens, self._waiting[output.choice]
        for position, told in enumerate(output.logprobs, output.first_position):
            if len(tokens) <= position < self._max_tokens:
                waiting[position] = _logprobs(told)
        num_before = len(tokens)
        delivery = super().accept(output)
        if delivery is None:
            return None
        logprobs = tuple(waiting.pop(place) for place in range(num_before, len(tokens)))
        return LogprobDelta(delivery.choice, delivery.token_ids, delivery.finish, logprobs)

    def resume(self, attempt: int) -> list[AttemptPlan]:
        for progress in self.choices:
            if self.carries(attempt, progress.choice):
                self._waiting[progress.choice].clear()
        return super().resume(attempt)


def _logprobs(told: pb.TokenLogprobs) -> TokenLogprobs:
    top = zip(told.top_token_ids, told.top_logprobs, strict=False)
    return TokenLogprobs(
        max(told.chosen, LEAST_LOGPROB), tuple((token, max(value, LEAST_LOGPROB)) for token, value in top)
    )

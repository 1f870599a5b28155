"""Accepted tokens are those of the current attempt, each once; reservations are released; consumers are notified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gateway_ports import InMemoryPorts
from tests.support.wait import eventually
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.core import FinishCause, OpenedRequest, Reservation
from torchrelay.gateway.inference.execution.generation import EmbeddingGeneration, Generation, LogprobGeneration
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter
from torchrelay.gateway.inference.execution.notifier import Notifier

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def output(
    attempt: int, choice: int, position: int, *tokens: int, finish: pb.FinishReason | int = 0
) -> pb.ChoiceOutput:
    made = pb.ChoiceOutput(
        key=types_pb2.AttemptKey(request_id="r", attempt=attempt),
        choice=choice,
        first_position=position,
        token_ids=tokens,
        num_cached_prompt_tokens=attempt,
    )
    made.finish_reason = finish  # type: ignore[assignment]
    return made


def test_tokens_in_order_are_accepted_until_the_finish() -> None:
    generation = Generation(1, 10)
    assert generation.first().forced == {0: ()}
    first = generation.accept(output(1, 0, 0, 5))
    assert first is not None and (first.token_ids, first.finish) == ((5,), None)
    last = generation.accept(output(1, 0, 1, 6, 7, finish=STOP))
    assert last is not None and (last.token_ids, last.finish) == ((6, 7), FinishCause.STOP)
    assert generation.is_finished and generation.is_over(1)
    assert generation.accept(output(1, 0, 3, 8)) is None
    assert generation.choices[0].tokens == [5, 6, 7]
    cut = Generation(1, 3).accept(output(1, 0, 0, 1, 2, 3, 4, 5))
    assert cut is not None and (cut.token_ids, cut.finish) == ((1, 2, 3), FinishCause.LENGTH)


def test_unknown_choices_and_stale_attempts_are_dropped() -> None:
    generation = Generation(2, 10)
    assert generation.accept(output(1, 7, 0, 1)) is None
    generation.accept(output(1, 0, 0, 1))
    plans = generation.resume(1)
    assert [(plan.attempt, plan.forced) for plan in plans] == [(2, {0: (1,)}), (3, {1: ()})]
    assert generation.accept(output(1, 0, 1, 9)) is None
    assert generation.accept(output(2, 0, 1, 2)) is not None
    assert generation.accept(output(3, 0, 2, 3)) is None  # another choice's attempt
    assert generation.choices[0].tokens == [1, 2]
    assert generation.num_attempts(2) == 2


def test_excused_attempts_are_those_of_a_choice() -> None:
    """A choice that lost its slot gives the others no more tries."""
    generation = Generation(2, 10)
    for choice in range(2):
        generation.accept(output(1, choice, 0, 5))
    lost, failed = generation.resume(1)
    for _ in range(3):
        [lost] = generation.resume(lost.attempt, is_excused=True)
    [failed] = generation.resume(failed.attempt)
    assert (generation.num_attempts(lost.attempt), generation.num_attempts(failed.attempt)) == (2, 3)


def with_logprobs(attempt: int, position: int, *tokens: int, finish: pb.FinishReason | int = 0) -> pb.ChoiceOutput:
    """Logprobs that name attempt and position: -(100 * attempt + position)."""
    made = output(attempt, 0, position, *tokens, finish=finish)
    for place, token in enumerate(tokens, position):
        made.logprobs.append(pb.TokenLogprobs(chosen=-100 * attempt - place, top_token_ids=[token], top_logprobs=[-1]))
    return made


def test_logprobs_follow_their_tokens_in_any_order() -> None:
    generation = LogprobGeneration(1, 6)
    assert generation.accept(with_logprobs(1, 2, 7, 8)) is None
    assert generation.accept(with_logprobs(1, 40, 9)) is None
    first = generation.accept(with_logprobs(1, 0, 5))
    assert first is not None and [item.chosen for item in first.logprobs] == [-100]
    second = generation.accept(with_logprobs(1, 0, 5, 6))  # a duplicate, a new one, and the early ones
    assert second is not None and second.token_ids == (6, 7, 8)
    assert [item.chosen for item in second.logprobs] == [-101, -102, -103]
    assert [item.top for item in second.logprobs] == [((6, -1.0),), ((7, -1.0),), ((8, -1.0),)]
    assert generation.accept(with_logprobs(1, 5, 99)) is None  # early, from an attempt that will be lost
    generation.resume(1)
    assert generation.accept(with_logprobs(1, 4, 98)) is None
    last = generation.accept(with_logprobs(2, 4, 1, 2, 3))
    assert last is not None and (last.token_ids, last.finish) == ((1, 2), FinishCause.LENGTH)
    assert [item.chosen for item in last.logprobs] == [-204, -205]
    assert not generation._waiting[0]


def test_prefill_ends_when_every_choice_has_a_new_token() -> None:
    generation = Generation(2, 10)
    assert not generation.has_prefilled(1)
    generation.accept(output(1, 0, 0, 5))
    assert not generation.has_prefilled(1)
    generation.accept(output(1, 1, 0, 5, finish=STOP))
    assert generation.has_prefilled(1)


def test_first_report_fixes_the_cached_tokens() -> None:
    generation = Generation(1, 10)
    generation.accept(output(1, 0, 0, 5))
    generation.resume(1)
    generation.accept(output(2, 0, 1, 6, finish=LENGTH))
    assert generation.usage(30).num_cached_prompt_tokens == 1
    settled = generation.settlement("r", 30, FinishCause.CANCELLED, by_caller=True)
    assert [(usage.num_prompt_tokens, usage.num_output_tokens, usage.cause) for usage in settled] == [
        (30, 2, FinishCause.LENGTH)
    ]


def prompt_progress(attempt: int, num_prompt: int, num_cached: int) -> pb.ChoiceOutput:
    key = types_pb2.AttemptKey(request_id="r", attempt=attempt)
    return pb.ChoiceOutput(key=key, num_prompt_tokens=num_prompt, num_cached_prompt_tokens=num_cached)


def billed(generation: Generation, *, by_caller: bool) -> tuple[int, int, int]:
    (usage,) = generation.settlement("r", 30, FinishCause.CANCELLED, by_caller=by_caller)
    return usage.num_prompt_tokens, usage.num_cached_prompt_tokens, usage.num_output_tokens


def test_cancel_before_first_token_bills_the_computed_prompt() -> None:
    generation = Generation(1, 10)
    assert billed(generation, by_caller=True) == (0, 0, 0)
    for attempt, computed in ((1, 12), (1, 20), (1, 16)):  # preempted: computed again
        progress = prompt_progress(attempt, computed, 8)
        assert generation.accept(progress) is None
        generation.advance_prompt(progress)
    assert billed(generation, by_caller=True) == (20, 8, 0)
    assert billed(generation, by_caller=False) == (0, 0, 0)
    generation.resume(1)
    for attempt, computed in ((1, 29), (2, 4)):  # of a stale attempt; of one that begins anew
        generation.advance_prompt(prompt_progress(attempt, computed, 0))
    assert billed(generation, by_caller=True) == (20, 8, 0)
    generation.advance_prompt(prompt_progress(2, 99, 0))
    assert billed(generation, by_caller=True) == (30, 8, 0)


@pytest.mark.parametrize("make", [partial(Generation, 1, 10), EmbeddingGeneration])
def test_cached_part_of_a_computed_prompt_is_billed_as_cached(make: Callable[[], Generation]) -> None:
    """Also of an embedding, whose progress no choice accepts."""
    generation = make()
    for computed, cached in ((1024, 1024), (1536, 1024)):
        progress = prompt_progress(1, computed, cached)
        assert generation.accept(progress) is None
        generation.advance_prompt(progress)
    (usage,) = generation.settlement("r", 2000, FinishCause.CANCELLED, by_caller=True)
    assert (usage.num_prompt_tokens, usage.num_cached_prompt_tokens) == (1536, 1024)


@pytest.mark.parametrize("kind", [Generation, LogprobGeneration])
def test_answer_without_tokens_ends_with_its_prompt(kind: type[Generation]) -> None:
    """Not with a report about a part of a long prompt; and the worker's token, with its cause, is not accepted."""
    generation = kind(1, 0)
    for attempt in (1, 2):
        assert generation.accept(prompt_progress(attempt, 12, 0)) is None and not generation.is_finished
        generation.resume(attempt)
    ended = generation.accept(with_logprobs(3, 0, 5, finish=STOP))
    assert ended is not None and (ended.token_ids, ended.finish) == ((), FinishCause.LENGTH)
    assert billed(generation, by_caller=False) == (30, 0, 0)


def test_first_token_bills_the_whole_prompt() -> None:
    generation = Generation(1, 10)
    generation.advance_prompt(prompt_progress(1, 12, 8))
    generation.accept(output(1, 0, 0, 5))
    assert [billed(generation, by_caller=by_caller)[0] for by_caller in (True, False)] == [30, 30]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[pb.ChoiceOutput | int]]:
    """The whole answer, and messages of several attempts: split, duplicated, late; an int is a failed attempt."""
    answer = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    events: list[pb.ChoiceOutput | int] = []
    num_attempts = draw(st.integers(1, 4))
    for attempt in range(1, num_attempts + 1):
        cuts = sorted({0, len(answer), *draw(st.lists(st.integers(0, len(answer)), max_size=6))})
        messages = [
            output(attempt, 0, begin, *answer[begin:end], finish=STOP if end == len(answer) else 0)
            for begin, end in pairwise(cuts)
        ]
        messages += draw(st.lists(st.sampled_from(messages), max_size=3))
        messages = draw(st.permutations(messages))
        if attempt < num_attempts:
            num_seen = draw(st.integers(0, len(messages)))
            events += [*messages[:num_seen], attempt, *messages[num_seen:]]  # the rest comes from a stale attempt
        else:
            events += messages
    return answer, events


@given(histories())
def test_any_history_gives_the_answer_once(history: tuple[list[int], list[pb.ChoiceOutput | int]]) -> None:
    answer, events = history
    generation = Generation(1, 100)
    delivered: list[int] = []
    finishes: list[FinishCause] = []
    for event in events:
        if isinstance(event, int):
            for plan in generation.resume(event):
                assert plan.forced == {0: tuple(delivered)}
            continue
        delivery = generation.accept(event)
        if delivery is not None:
            delivered += delivery.token_ids
            finishes += [delivery.finish] if delivery.finish else []
    assert delivered == answer == generation.choices[0].tokens
    assert finishes == [FinishCause.STOP]


OPENED = OpenedRequest("r", "t", "k", "m", "v", "p", 1, 1, 1, "g", 0)
RESERVATION = Reservation("rsv", "t", "k", 100, reserved_nano=5)


class Limits(InMemoryPorts):
    """Limits whose Redis does not answer the first ``num_lost`` releases."""

    num_lost = 0
    num_asked = 0

    async def release(self, reservation: Reservation, cost_nano: int, num_tokens: int) -> bool:
        self.num_asked += 1
        return self.num_asked > self.num_lost and await super().release(reservation, cost_nano, num_tokens)


@pytest.fixture
def limits() -> Limits:
    return Limits([])


async def settle(writer: LedgerWriter) -> None:
    await writer.settle(writer.open(OPENED), RESERVATION, "r", "acme/echo", [])


async def test_lost_release_is_retried_off_the_request_path(limits: Limits) -> None:
    limits.num_lost = 3
    async with LedgerWriter(limits, limits, drain_s=5, release_retry_s=(0.05,) * 3) as writer:
        await settle(writer)
        assert (limits.num_asked, limits.released, writer.num_waiting) == (1, {}, 0)
        await eventually(lambda: "rsv" in limits.released)
        assert limits.num_asked == 4


async def test_retried_releases_are_bounded(limits: Limits) -> None:
    limits.num_lost = 1000
    async with LedgerWriter(limits, limits, drain_s=5, release_retry_s=(0.05,) * 2, max_releases=2) as writer:
        for _ in range(4):
            await settle(writer)
        await eventually(lambda: limits.num_asked >= 4 + 2 * 2)
    assert limits.num_asked == 4 + 2 * 2  # on exit each release that still waited would be tried once more


@pytest.mark.parametrize("num_lost", [1, 1000])
async def test_close_retries_releases_once_at_once(limits: Limits, num_lost: int) -> None:
    limits.num_lost = num_lost
    async with LedgerWriter(limits, limits, drain_s=30, release_retry_s=(3600.0,) * 2) as writer:
        await settle(writer)
    assert limits.num_asked == 2  # a retry after its delay would be cancelled by then
    assert bool(limits.released) == (num_lost == 1)


async def test_notifications_are_coalesced_and_none_is_lost() -> None:
    notifier = Notifier(10, lambda: 10)
    notifier.notify()
    notifier.notify()
    assert await notifier.wait()
    waiting = asyncio.ensure_future(notifier.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    notifier.notify()
    assert await waiting
    notifier.close()


async def test_notifier_ticks_without_notifications_until_closed() -> None:
    notifier = Notifier(0.01, lambda: 0.02)
    assert not await notifier.wait()
    assert not await notifier.wait()
    notifier.close()
    assert notifier._timer.cancelled()


async def test_cancelled_wait_loses_no_notification() -> None:
    notifier = Notifier(10, lambda: 10)
    waiting = asyncio.ensure_future(notifier.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    notifier.notify()
    assert await notifier.wait()
    notifier.close()


async def test_pause_ignores_notifications_and_can_be_ended() -> None:
    notifier = Notifier(10, lambda: 10)
    await notifier.pause(0.01)
    notifier.end_pause()  # nobody pauses
    pausing = asyncio.ensure_future(notifier.pause(10))
    await asyncio.sleep(0)
    notifier.notify()
    await asyncio.sleep(0)
    assert not pausing.done()
    notifier.end_pause()
    await pausing
    assert await notifier.wait()
    notifier.close()

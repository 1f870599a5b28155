"""Retry-After: a client that comes back when it was told to finds a place, and would not have found one much sooner."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from statistics import median

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.admission.queues import AdmissionQueues
from torchrelay.scheduler.policy.admission.retry_times import MAX_S, MIN_S, RetryTimes
from torchrelay.scheduler.policy.types import AttemptKey

MODEL = a_model()
VERSION = MODEL.version_id
LIMIT = 32
PLACES_PER_S = 10.0
PREDICTED_PER_S = 3.0  # before anything is measured: as far off as a cold latency model

RetryAfter = Callable[[AdmissionQueues, float], float]


def retry_factors(overload: float, retry_after_s: RetryAfter) -> list[float]:
    """For each refusal of a minute of so many times more arrivals than places: how far off was what it said?

    Refused clients come back when they were told to, until they are accepted. Off is both to be refused once more, and
    to be away while there is a place for this client and for all that were refused before it.
    """
    rng, queues, sequence = random.Random(7), AdmissionQueues(LIMIT, LIMIT), count()
    events: list[tuple[float, int, str]] = []  # by time; a client's name, or none where places become free

    def happens(at: float, client: str) -> None:
        heapq.heappush(events, (at, next(sequence), client))

    at = 0.0
    while (at := at + rng.expovariate(overload * PLACES_PER_S)) < 60.0:
        happens(at, f"client {at}")
    happens(1.0, "")
    refusals: list[tuple[str, float, float]] = []  # client, time, what it was told
    away: dict[str, float] = {}  # since when
    accepted_at: dict[str, float] = {}
    place_at: dict[str, float] = {}  # when there was one for each that is away, in the order of their refusals
    while events and (events[0][2] or len(events) > 1):
        now, _, client = heapq.heappop(events)
        admission = an_admission(MODEL, client, now=now)
        if not client:
            for _ in range(4):  # as many as begin in one step
                if first := queues.next(VERSION, now):
                    queues.take(first.key, now)
            for other in list(away)[: LIMIT - len(queues)]:
                place_at.setdefault(other, now)
            happens(now + rng.uniform(0.5, 1.5) * 4 / PLACES_PER_S, "")
        elif queues.displaced_by(admission) is None:
            queues.push(admission)
            accepted_at[client] = now
            away.pop(client, None)
        else:
            told_s = retry_after_s(queues, now)
            refusals.append((client, now, told_s))
            away.setdefault(client, now)
            happens(now + told_s, client)
    assert len(refusals) > 100
    factors = []
    for client, refused_at, told_s in refusals:
        had_place_at = place_at.get(client, 0.0)
        actual_s = (
            min(accepted_at[client], had_place_at) if had_place_at > refused_at else accepted_at[client]
        ) - refused_at
        factors.append(max(actual_s / told_s, told_s / actual_s))
    return factors


def own_place() -> RetryAfter:
    retry_times = RetryTimes()
    return lambda queues, now: retry_times.retry_s(
        VERSION, queues.places_per_s(VERSION, now) or PREDICTED_PER_S, 0.0, now
    )


def whole_queue(queues: AdmissionQueues, now: float) -> float:
    """Time that a newcomer would wait if the queue took it, at the true rate."""
    return min(max(queues.num_waiting(VERSION) / PLACES_PER_S, MIN_S), MAX_S)


@pytest.mark.parametrize("overload", [1.2, 1.5, 2.0, 3.0])
def test_median_retry_time_is_within_factor_of_two(overload: float) -> None:
    assert median(retry_factors(overload, own_place())) <= 2.0


def test_whole_queue_time_is_wrong_for_most_refused() -> None:
    assert median(retry_factors(2.0, whole_queue)) > 4.0


def test_each_refused_client_gets_later_retry_time() -> None:
    retry_times = RetryTimes()
    told = [retry_times.retry_s(VERSION, 0.5, 4.0, 100.0) for _ in range(3)]
    assert told == [6.0, 8.0, 10.0]
    assert retry_times.retry_s("another", 0.5, 0.0, 100.0) == 2.0
    assert retry_times.retry_s(VERSION, 0.5, 0.0, 109.0) == 3.0  # 2 s after the client that is due at 110
    assert retry_times.retry_s(VERSION, 1e6, 0.0, 113.0) == MIN_S
    assert retry_times.retry_s(VERSION, 1e-6, 0.0, 113.0) == MAX_S
    assert retry_times.retry_s(VERSION, 0.5, 0.0, 173.0) == 2.0  # it came back, whatever it was told


def test_place_rate_counts_only_waiting_time() -> None:
    queues, numbers = AdmissionQueues(1000, 1000), count()

    def push(num: int, now: float) -> None:
        for _ in range(num):
            queues.push(an_admission(MODEL, f"r{next(numbers)}", now=now))

    def take(now: float, num: int = 1) -> None:
        for _ in range(num):
            first = queues.next(VERSION, now)
            assert first is not None
            queues.take(first.key, now)

    push(100, 0.0)
    assert queues.places_per_s(VERSION, 10.0) is None
    take(30.0, 8)  # a load that took 30 s: what was waited for an instance says nothing about its rate
    assert queues.places_per_s(VERSION, 30.0) is None
    for step in range(1, 24):
        take(30.0 + step, 4)
    assert queues.num_waiting(VERSION) == 0
    push(1, 500.0)
    assert queues.places_per_s(VERSION, 500.0) is None  # that was long ago, with who knows which instances
    for now in range(501, 511):  # one at a time, each placed at once: that is the rate of the clients
        take(float(now))
        push(1, float(now) + 0.9)
    assert queues.places_per_s(VERSION, 511.0) == pytest.approx(4.0)
    queues.remove(AttemptKey("r110", 1), 511.0)
    push(50, 540.0)
    take(540.0, 8)  # nobody waited since 511
    take(541.0, 4)
    assert queues.places_per_s(VERSION, 541.0) == pytest.approx(4.0)
    assert queues.places_per_s(VERSION, 741.0) < 0.2  # type: ignore[operator]  # its instances hang

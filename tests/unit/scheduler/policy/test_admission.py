"""Queues: the next request, the request that must leave, late requests, and when refused clients come back."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from itertools import combinations, count
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.admission.due_times import DueTimes
from torchrelay.scheduler.policy.admission.late_requests import TimedPrompt, fewest_late, late_rank
from torchrelay.scheduler.policy.admission.queues import AdmissionQueues
from torchrelay.scheduler.policy.admission.retry_times import MAX_S, MIN_S, RetryTimes
from torchrelay.scheduler.policy.types import Admission, AttemptKey, ServiceClass

MODEL = a_model()
NOW = 100.0


def of(tenant: str, request_id: str, **changes: object) -> Admission:
    changes = {"model": f"{tenant}/tiny", "num_prompt_tokens": 100, "admitted_at": NOW, **changes}
    return structs.replace(an_admission(MODEL, request_id), **changes)


def queues_with(*admissions: Admission, limit: int = 100) -> AdmissionQueues:
    queues = AdmissionQueues(limit, limit_total=1000)
    for admission in admissions:
        queues.push(admission)
    return queues


def order_of(queues: AdmissionQueues, now: float = NOW) -> list[str]:
    """Takes all requests, and returns their ids in this order."""
    request_ids = []
    while (admission := queues.next(MODEL.version_id, now)) is not None:
        queues.take(admission.key, NOW)
        request_ids.append(admission.key.request_id)
    return request_ids


def batch_of(tenant: str, request_id: str, ttft_target_s: float, **changes: object) -> Admission:
    return of(tenant, request_id, service_class=ServiceClass.BATCH, ttft_target_s=ttft_target_s, **changes)


def test_batch_work_yields_until_its_own_deadline_is_near() -> None:
    admissions = (batch_of("b", "batch", 600.0), of("t", "chat"), of("t", "another"))
    assert order_of(queues_with(*admissions)) == ["chat", "another", "batch"]
    assert order_of(queues_with(*admissions), now=NOW + 580.0) == ["chat", "batch", "another"]


def test_batch_work_near_deadline_takes_turns() -> None:
    chats = [of("chats", f"c{n}", ttft_target_s=0.5) for n in range(5)]
    batches = [batch_of("batches", f"b{n}", 20.0) for n in range(5)]
    assert "".join(request_id[0] for request_id in order_of(queues_with(*batches, *chats))) == "cb" * 5


def test_batch_work_near_deadline_counts_for_served_tenant() -> None:
    queues = queues_with(batch_of("late", "first", 600.0), batch_of("late", "second", 700.0))
    assert queues.next(MODEL.version_id, NOW) is not None
    queues.take(AttemptKey("first", 1), NOW)
    queues.push(batch_of("patient", "patient", 3600.0))
    queues.push(of("chats", "chat"))
    assert order_of(queues, now=NOW + 680.0) == ["chat", "second", "patient"]


def test_new_tenant_is_not_charged_for_batch_work() -> None:
    queues = queues_with(*(of("chats", f"c{n}") for n in range(20)))
    for number in range(20):
        queues.push(batch_of("batches", f"b{number}", 10.0, num_prompt_tokens=100_000))
    for _ in range(10):
        admission = queues.next(MODEL.version_id, NOW)
        assert admission is not None
        queues.take(admission.key, NOW)
    queues.push(of("new", "newcomer"))
    assert "newcomer" in order_of(queues)[:2]


def test_timely_service_is_not_charged_to_batch_work() -> None:
    queues = queues_with(of("a", "chat"), batch_of("a", "a", 3600.0), batch_of("b", "b", 3600.0))
    assert order_of(queues) == ["chat", "a", "b"]


def test_removed_or_parked_request_is_not_next() -> None:
    queues = queues_with(of("t", "a"), of("t", "b"), of("t", "c"))
    queues.remove(AttemptKey("a", 1), NOW)
    queues.park(AttemptKey("b", 1))
    following = queues.next(MODEL.version_id, NOW)
    assert following is not None and following.key.request_id == "c"
    assert queues.num_waiting(MODEL.version_id) == 2
    queues.unpark(AttemptKey("b", 1))
    assert order_of(queues) == ["b", "c"] and len(queues) == 0 and queues.versions == ()


def test_parked_late_request_stays_late() -> None:
    queues = queues_with(of("t", "late"), of("t", "in time"))
    assert queues.fall_late(AttemptKey("late", 1), 5.0)
    queues.park(AttemptKey("late", 1))
    queues.unpark(AttemptKey("late", 1))
    assert not queues.fall_late(AttemptKey("late", 1), 1.0)
    assert order_of(queues) == ["in time", "late"]


def test_repeatedly_parked_request_is_stored_once() -> None:
    queues = queues_with(of("t", "stays"), of("t", "again"))
    for _ in range(500):
        queues.park(AttemptKey("again", 1))
        queues.unpark(AttemptKey("again", 1))
        queues.check_integrity()
    assert order_of(queues) == ["stays", "again"]


def test_full_queue_refuses_tenant_with_most_requests() -> None:
    queues = queues_with(*(of("crowd", f"c{n}") for n in range(3)), of("other", "o"), limit=4)
    newcomer = of("alone", "a")
    displaced = queues.displaced_by(newcomer)
    assert displaced is not None and displaced.key.request_id == "c2", "its last one"
    own = of("crowd", "c3")
    assert queues.displaced_by(own) is own
    assert queues_with(of("crowd", "c0"), limit=4).displaced_by(newcomer) is None


def test_full_queue_refuses_late_request_first() -> None:
    """Late requests filled the queue of a long overload, were never served, and newcomers in time were refused."""
    queues = queues_with(*(of("acme", f"a{n}") for n in range(4)), limit=4)
    for rank, name in enumerate(("a2", "a3", "a1")):
        queues.fall_late(AttemptKey(name, 1), float(rank))
    displaced = queues.displaced_by(of("acme", "newcomer"))
    assert displaced is not None and displaced.key.request_id == "a1", "it waits longest"
    displaced = queues.displaced_by(of("birch", "newcomer"))
    assert displaced is not None and displaced.key.request_id == "a1", "its tenant has most requests"


def test_full_queue_keeps_requests_with_tokens() -> None:
    begun = [of("crowd", f"c{n}", num_forced_tokens=5) for n in (1, 2)]
    displaced = queues_with(of("crowd", "c0"), *begun, limit=3).displaced_by(of("alone", "a"))
    assert displaced is not None and displaced.key.request_id == "c0"
    newcomer = of("alone", "a")
    assert queues_with(*begun, limit=2).displaced_by(newcomer) is newcomer


def test_total_limit_refuses_tenant_with_most_requests() -> None:
    """P17: a tenant with many models filled the total, and everybody else's newcomers were refused."""
    queues = AdmissionQueues(limit=100, limit_total=9)
    for number in range(8):
        queues.push(of("crowd", f"c{number}", version_id="short" if number < 3 else "long"))
    queues.push(of("other", "o"))
    displaced = queues.displaced_by(of("alone", "a", version_id="new"))
    assert displaced is not None and displaced.key.request_id == "c7", "the last of its longest queue"
    own = of("crowd", "c8", version_id="new")
    assert queues.displaced_by(own) is own
    for number in range(3, 8):
        queues.remove(AttemptKey(f"c{number}", 1), NOW)
        queues.push(of("crowd", f"begun {number}", version_id="long", num_forced_tokens=5))
    displaced = queues.displaced_by(of("alone", "a", version_id="new"))
    assert displaced is not None and displaced.key.request_id == "c2", "nobody reads this one yet"
    queues.check_integrity()


def test_refunded_late_batch_work_is_not_charged() -> None:
    batch = of("a", "batch", service_class=ServiceClass.BATCH, num_prompt_tokens=100_000)
    queues = queues_with(batch)
    queues.fall_late(batch.key, rank=NOW)
    assert queues.next(MODEL.version_id, NOW) is batch
    queues.take(batch.key, NOW)
    queues.refund(batch)
    for admission in (*(of("a", f"a{n}") for n in range(3)), of("b", "b0")):
        queues.push(admission)
    assert order_of(queues)[:2] == ["a0", "b0"]


def test_late_batch_work_waits_with_late_requests() -> None:
    batch = of("a", "batch", service_class=ServiceClass.BATCH, ttft_target_s=600.0)
    queues = queues_with(batch, of("a", "late", ttft_target_s=1.0), of("a", "r"))
    queues.fall_late(batch.key, rank=NOW)
    queues.fall_late(AttemptKey("late", 1), rank=NOW + 1.0)
    assert order_of(queues) == ["r", "batch", "late"]


def prompts_of(*pairs: tuple[float, float]) -> list[TimedPrompt]:
    """Prompts with these deadlines and computation times, in the order of their deadlines."""
    ordered = sorted(pairs)
    return [TimedPrompt(AttemptKey(f"r{n}", 1), deadline, prompt_s) for n, (deadline, prompt_s) in enumerate(ordered)]


def are_in_time(prompts: list[TimedPrompt], begins_at: float) -> bool:
    """Whether all prompts are in time if an instance computes them in this order."""
    for prompt in prompts:
        begins_at += prompt.prompt_s
        if begins_at > prompt.deadline:
            return False
    return True


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 8)).map(lambda pair: (float(pair[0]), float(pair[1]))), max_size=7
    )
)
def test_choice_has_fewest_late_prompts(pairs: list[tuple[float, float]]) -> None:
    prompts = prompts_of(*pairs)
    late = fewest_late(prompts, [0.0])
    kept = [prompt for prompt in prompts if prompt.key not in late]
    assert len(late) + len(kept) == len(prompts)
    assert are_in_time(kept, 0.0)
    more = combinations(prompts, len(kept) + 1)
    assert not any(are_in_time(list(chosen), 0.0) for chosen in more)


@pytest.mark.parametrize(("free_at", "share"), [([0.0, 0.0], 1.0), ([0.0, 0.0, 0.0, 0.0], 0.5)])
def test_instances_compute_by_their_share_of_time(free_at: list[float], share: float) -> None:
    prompts = prompts_of(*((2.0, 1.0) for _ in range(5)))
    assert len(fewest_late(prompts, free_at, share)) == 2, (
        "two at a time: two and two are in time, and one begins at 1.5"
    )


def test_busy_instance_counts_from_its_free_time() -> None:
    prompts = prompts_of((2.0, 1.0), (2.0, 1.0), (3.0, 1.0))
    assert fewest_late(prompts, [0.0, 1.0]) == []
    assert len(fewest_late(prompts, [0.0, 9.0])) == 0
    assert len(fewest_late(prompts, [1.0, 9.0])) == 1


def test_started_request_is_never_late_and_counts() -> None:
    first, second = prompts_of((5.0, 5.0), (6.0, 2.0))
    assert fewest_late([first._replace(may_be_late=False), second], [0.0]) == [second.key]


def test_late_started_request_makes_no_earlier_request_late() -> None:
    first, second = prompts_of((2.0, 1.0), (3.0, 5.0))
    assert fewest_late([first, second._replace(may_be_late=False)], [0.0]) == []


def test_late_short_prompt_precedes_long_one_up_to_price() -> None:
    long_, short = (an_admission(a_model(), name) for name in ("long", "short"))
    assert late_rank(short, 0.1) < late_rank(long_, 0.5)
    much_younger = structs.replace(short, admitted_at=long_.admitted_at + 100.0)
    assert late_rank(much_younger, 0.1) > late_rank(long_, 0.5)


def test_earliest_due_time_ignores_removed_entries() -> None:
    due, random = DueTimes(), Random(1)
    assert due.earliest == math.inf
    for _ in range(2000):
        version_id = f"v{random.randrange(20)}"
        if random.random() < 0.3:
            due.pop(version_id, None)
        else:
            due[version_id] = float(random.randrange(50))
        assert due.earliest == min(due.values(), default=math.inf)


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


@pytest.mark.parametrize("overload", [1.2, 1.5, 2.0, 3.0])
def test_median_retry_time_is_within_factor_of_two(overload: float) -> None:
    assert median(retry_factors(overload, own_place())) <= 2.0


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

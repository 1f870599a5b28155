"""Queues: the next request, the request that must leave, and when refused clients come back."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.queue.late_requests import late_rank
from torchrelay.scheduler.policy.queue.model_queue import MAX_RETRY_S, MIN_RETRY_S, ModelQueues
from torchrelay.scheduler.policy.types import Admission, AttemptKey, ServiceClass

MODEL = a_model()
NOW = 100.0


def of(tenant: str, request_id: str, **changes: object) -> Admission:
    changes = {"model": f"{tenant}/tiny", "num_prompt_tokens": 100, "admitted_at": NOW, **changes}
    return structs.replace(an_admission(MODEL, request_id), **changes)


def queues_with(*admissions: Admission, limit: int = 100) -> ModelQueues:
    queues = ModelQueues(limit, limit_total=1000)
    for admission in admissions:
        queues.push(admission, NOW)
    return queues


def order_of(queues: ModelQueues, now: float = NOW) -> list[str]:
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
    queues.push(batch_of("patient", "patient", 3600.0), NOW)
    queues.push(of("chats", "chat"), NOW)
    assert order_of(queues, now=NOW + 680.0) == ["chat", "second", "patient"]


def test_new_tenant_is_not_charged_for_batch_work() -> None:
    queues = queues_with(*(of("chats", f"c{n}") for n in range(20)))
    for number in range(20):
        queues.push(batch_of("batches", f"b{number}", 10.0, num_prompt_tokens=100_000), NOW)
    for _ in range(10):
        admission = queues.next(MODEL.version_id, NOW)
        assert admission is not None
        queues.take(admission.key, NOW)
    queues.push(of("new", "newcomer"), NOW)
    assert "newcomer" in order_of(queues)[:2]


def test_timely_service_is_not_charged_to_batch_work() -> None:
    queues = queues_with(of("a", "chat"), batch_of("a", "a", 3600.0), batch_of("b", "b", 3600.0))
    assert order_of(queues) == ["chat", "a", "b"]


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


def test_total_limit_refuses_tenant_with_most_requests() -> None:
    """P17: a tenant with many models filled the total, and everybody else's newcomers were refused."""
    queues = ModelQueues(limit=100, limit_total=9)
    for number in range(8):
        queues.push(of("crowd", f"c{number}", version_id="short" if number < 3 else "long"), NOW)
    queues.push(of("other", "o"), NOW)
    displaced = queues.displaced_by(of("alone", "a", version_id="new"))
    assert displaced is not None and displaced.key.request_id == "c7", "the last of its longest queue"
    own = of("crowd", "c8", version_id="new")
    assert queues.displaced_by(own) is own
    for number in range(3, 8):
        queues.remove(AttemptKey(f"c{number}", 1), NOW)
        queues.push(of("crowd", f"begun {number}", version_id="long", num_forced_tokens=5), NOW)
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
        queues.push(admission, NOW)
    assert order_of(queues)[:2] == ["a0", "b0"]


def test_refund_remains_when_last_request_falls_late() -> None:
    recalled = of("a", "recalled", num_prompt_tokens=5000)
    queues = queues_with(recalled, *(of("b", f"b{n}") for n in range(4)))
    queues.take(recalled.key, NOW)
    for name in ("b0", "b1", "b2"):
        queues.take(AttemptKey(name, 1), NOW)
    late = of("a", "late")
    queues.push(late, NOW)
    queues.refund(recalled)
    queues.fall_late(late.key, NOW + 100.0)
    queues.push(of("a", "again"), NOW)
    assert order_of(queues) == ["again", "late", "b3"]


@given(
    st.lists(
        st.tuples(st.floats(0.1, 100.0), st.floats(0.01, 2.0), st.booleans(), st.sampled_from(ServiceClass)),
        min_size=1,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_requests_in_time_go_by_deadline_before_late_ones_before_batch_work(
    requests: list[tuple[float, float, bool, ServiceClass]], order: random.Random
) -> None:
    """Whatever the order of arrival, whichever requests fall late, and whichever are parked for a while."""
    arrivals = []
    for number, (target_s, prompt_s, is_late, service_class) in enumerate(requests):
        target_s += 100.0 * (service_class is ServiceClass.BATCH)
        request = of("t", f"r{number}", ttft_target_s=target_s, service_class=service_class)
        is_last = service_class is ServiceClass.BATCH and not is_late
        rank = late_rank(request, prompt_s) if is_late else request.deadline
        arrivals.append(((is_last, is_late, rank), request))
    order.shuffle(arrivals)
    queues = queues_with(*(request for _, request in arrivals))
    for (_, is_late, rank), request in arrivals:
        if is_late:
            assert queues.fall_late(request.key, rank) and not queues.fall_late(request.key, rank - 9.0)
        if order.random() < 0.5:
            queues.park(request.key)
            assert queues.num_waiting(MODEL.version_id) == len(requests)
            queues.unpark(request.key)
    assert order_of(queues) == [request.key.request_id for _, request in sorted(arrivals, key=lambda each: each[0])]
    assert len(queues) == 0 and queues.versions == ()


@given(prompt_s=st.floats(0.01, 2.0), interval_s=st.floats(0.5, 60.0), others_s=st.floats(0.01, 2.0))
def test_late_request_becomes_first_among_later_ones(prompt_s: float, interval_s: float, others_s: float) -> None:
    """Newcomers may overtake a late request only until their deadlines exceed its rank."""
    first = of("t", "first", ttft_target_s=1.0)
    queues, num_before = queues_with(first), 0
    queues.fall_late(first.key, late_rank(first, prompt_s))
    while True:
        newcomer = of("t", f"r{num_before}", ttft_target_s=1.0, admitted_at=NOW + num_before * interval_s)
        queues.push(newcomer, newcomer.admitted_at)
        queues.fall_late(newcomer.key, late_rank(newcomer, others_s))
        served = queues.next(MODEL.version_id, newcomer.admitted_at)
        assert served is not None
        queues.take(served.key, newcomer.admitted_at)
        if served is first:
            break
        num_before += 1
        assert num_before <= (late_rank(first, prompt_s) - first.deadline) / interval_s + 1


VERSION = MODEL.version_id


def test_each_refused_client_gets_later_retry_time() -> None:
    queues = queues_with()
    assert [queues.retry_s(VERSION, 0.5, 100.0) for _ in range(3)] == [2.0, 4.0, 6.0]
    assert queues.retry_s("another", 0.5, 100.0) == 2.0
    assert queues.retry_s(VERSION, 0.5, 105.0) == 3.0  # 2 s after the client that is due at 106
    assert queues.retry_s(VERSION, 1e6, 109.0) == MIN_RETRY_S
    assert queues.retry_s(VERSION, 1e-6, 109.0) == MAX_RETRY_S
    assert queues.retry_s(VERSION, 0.5, 169.0) == 2.0  # it came back, whatever it was told


def test_place_rate_counts_only_waiting_time() -> None:
    queues, numbers = ModelQueues(1000, 1000), count()

    def push(num: int, now: float) -> None:
        for _ in range(num):
            queues.push(an_admission(MODEL, f"r{next(numbers)}", now=now), now)

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

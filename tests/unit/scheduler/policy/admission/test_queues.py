"""The next request of a queue, and the request that must leave a full queue."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.admission.queues import AdmissionQueues
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


def test_tenant_with_many_requests_does_not_delay_other() -> None:
    queues = queues_with(*(of("crowd", f"c{n}") for n in range(5)), of("alone", "a"))
    assert order_of(queues)[:2] == ["c0", "a"]


def test_idle_tenant_accumulates_no_credit() -> None:
    queues = queues_with(*(of("early", f"e{n}") for n in range(20)))
    for _ in range(10):
        admission = queues.next(MODEL.version_id, NOW)
        assert admission is not None
        queues.take(admission.key, NOW)
    for number in range(10):
        queues.push(of("late", f"l{number}"))
    assert Counter(request_id[0] for request_id in order_of(queues)[:10])["l"] in (5, 6)


def test_earliest_deadline_of_tenant_is_first() -> None:
    queues = queues_with(of("t", "patient", ttft_target_s=10.0), of("t", "urgent", ttft_target_s=0.5))
    assert order_of(queues) == ["urgent", "patient"]


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


def test_parked_request_can_be_removed() -> None:
    queues = queues_with(of("t", "a"))
    queues.park(AttemptKey("a", 1))
    assert queues.remove(AttemptKey("a", 1), NOW) is not None
    queues.unpark(AttemptKey("a", 1))
    assert len(queues) == 0 and queues.next(MODEL.version_id, NOW) is None


def test_removed_requests_free_memory_behind_waiting_one() -> None:
    queues = queues_with(of("t", "stays"))
    for number in range(500):
        left = of("t", f"left-{number}")
        queues.push(left)
        queues.remove(left.key, NOW)
        assert queues.next(MODEL.version_id, NOW) is not left
        queues.check_integrity()


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


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000), st.booleans()), max_size=40))
def test_each_request_is_served_once_and_fairly(requests: list[tuple[str, int, bool]]) -> None:
    batch = {"service_class": ServiceClass.BATCH, "ttft_target_s": 3600.0}
    admissions = [
        of(tenant, f"{tenant}{n}", num_prompt_tokens=tokens, **(batch if is_batch else {}))
        for n, (tenant, tokens, is_batch) in enumerate(requests)
    ]
    queues = queues_with(*admissions)
    assert queues.num_prefill_tokens(MODEL.version_id) == sum(each.num_prefill_tokens for each in admissions)
    served: Counter[str] = Counter()
    taken = []
    while (admission := queues.next(MODEL.version_id, NOW)) is not None:
        timely = {each.tenant for each in queues if each.service_class is ServiceClass.STANDARD}
        assert admission.service_class is ServiceClass.STANDARD or not timely
        if timely:
            # Start-time fair queueing: two tenants that both wait are never apart by more than a request of each.
            assert served[admission.tenant] <= min(served[tenant] for tenant in timely) + 2 * 5000
            served[admission.tenant] += admission.num_prefill_tokens
        queues.take(admission.key, NOW)
        taken.append(admission.key)
    assert sorted(taken) == sorted(each.key for each in admissions) and len(queues) == 0


def test_timely_requests_precede_late_ones() -> None:
    late = [of("a", f"late{n}", ttft_target_s=1.0) for n in range(6)]
    queues = queues_with(*late, *(of("a", f"r{n}", ttft_target_s=5.0) for n in range(64)))
    for number, admission in enumerate(late):
        assert queues.fall_late(admission.key, rank=6.0 - number)
    assert not queues.fall_late(late[0].key, rank=0.0), "it is known"
    assert order_of(queues) == [f"r{n}" for n in range(64)] + [f"late{5 - n}" for n in range(6)]


def test_timely_requests_are_of_same_tenant_and_version() -> None:
    queues = queues_with(*(of("a", f"a{n}", ttft_target_s=9.0 - n) for n in range(4)), of("b", "b0"))
    queues.fall_late(AttemptKey("a3", 1), rank=0.0)
    timely, share = queues.timely_beside(AttemptKey("a0", 1), 2)
    assert [admission.key.request_id for admission in timely] == ["a2", "a1"]
    assert share == 0.5


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


def test_tenant_with_late_requests_keeps_its_turns() -> None:
    late = [of("a", f"a{n}", ttft_target_s=1.0) for n in range(3)]
    queues = queues_with(*late, *(of("b", f"b{n}", ttft_target_s=5.0) for n in range(3)))
    for admission in late:
        queues.fall_late(admission.key, admission.deadline)
    assert order_of(queues) == ["a0", "b0", "a1", "b1", "a2", "b2"]

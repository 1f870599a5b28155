"""Tenants that wait for the same version get equal service, whenever their requests come and go."""

from __future__ import annotations

from itertools import combinations, count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.queue.model_queue import ModelQueues
from torchrelay.scheduler.policy.types import Admission, AttemptKey

VERSION_ID = a_model().version_id
TENANTS = "abcd"


def of(tenant: str, number: int, num_tokens: int) -> Admission:
    key = AttemptKey(f"{tenant}{number}", 1)
    return Admission(key, "gateway-1", VERSION_ID, num_tokens, 0, 10, 1, float(number), model=f"{tenant}/tiny")


def take_next(queues: ModelQueues) -> Admission:
    admission = queues.next(VERSION_ID, 0.0)
    assert admission is not None
    queues.take(admission.key, 0.0)
    return admission


@pytest.mark.parametrize(("empty_s", "expected"), [(29.0, "aaaa"), (30.0, "baaa")])
def test_debts_of_an_empty_queue_expire_after_half_a_minute(empty_s: float, expected: str) -> None:
    queues = ModelQueues(1000, 1000)
    queues.push(of("b", 0, 8000), 0.0)
    take_next(queues)
    for number in range(1, 5):
        queues.push(of("b", number, 8000), empty_s)
        queues.push(of("a", number, 1000), empty_s)
    assert "".join(take_next(queues).tenant for _ in range(4)) == expected


class Serving(RuleBasedStateMachine):
    """Over any sequence of services at each of which two tenants wait, their service differs by no more than
    one request of each (Goyal et al., theorem 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.queues = ModelQueues(1000, 1000)
        self.numbers = count()
        self.waiting: dict[AttemptKey, Admission] = {}
        self.parked: dict[AttemptKey, Admission] = {}
        self.largest = dict.fromkeys(TENANTS, 0)  # request of each tenant
        self.ahead = {pair: 0.0 for pair in combinations(TENANTS, 2)}  # the first of two while both wait
        self.least = dict(self.ahead)
        self.most = dict(self.ahead)

    @rule(tenant=st.sampled_from(TENANTS), num_tokens=st.sampled_from([1, 100, 3000]), num=st.integers(1, 3))
    def some_come(self, tenant: str, num_tokens: int, num: int) -> None:
        for _ in range(num):
            admission = of(tenant, next(self.numbers), num_tokens)
            self.queues.push(admission, 0.0)
            self.waiting[admission.key] = admission
        self.largest[tenant] = max(self.largest[tenant], num_tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.waiting)))
        assert self.queues.remove(key, 0.0) is self.waiting.pop(key)

    @precondition(lambda self: self.waiting)
    @rule()
    def the_next_will_be_late(self) -> None:
        admission = self.queues.next(VERSION_ID, 0.0)
        assert admission is not None
        self.queues.fall_late(admission.key, admission.deadline)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def one_is_parked(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.waiting)))
        self.queues.park(key)
        self.parked[key] = self.waiting.pop(key)

    @rule()
    def all_are_unparked(self) -> None:
        for key in self.parked:
            self.queues.unpark(key)
        self.waiting |= self.parked
        self.parked.clear()

    @precondition(lambda self: self.waiting)
    @rule(sends_another=st.booleans())
    def one_is_served(self, sends_another: bool) -> None:
        tenants = {admission.tenant for admission in self.waiting.values()}
        admission = take_next(self.queues)
        assert self.waiting.pop(admission.key) is admission
        self.queues.next(VERSION_ID, 0.0)
        for pair in self.ahead:
            if not tenants.issuperset(pair):
                self.ahead[pair] = self.least[pair] = self.most[pair] = 0.0
            elif admission.tenant in pair:
                service = admission.num_prefill_tokens
                self.ahead[pair] += service if admission.tenant == pair[0] else -service
                self.least[pair] = min(self.least[pair], self.ahead[pair])
                self.most[pair] = max(self.most[pair], self.ahead[pair])
        if sends_another:
            self.some_come(admission.tenant, admission.num_prefill_tokens, 1)

    @invariant()
    def nobody_who_waits_is_far_behind(self) -> None:
        for first, second in self.ahead:
            bound = self.largest[first] + self.largest[second]
            assert self.most[first, second] - self.least[first, second] <= bound + 1e-6, (first, second)

    @invariant()
    def everybody_who_waits_is_there(self) -> None:
        self.queues.check_integrity()
        assert {admission.key for admission in self.queues} == {*self.waiting, *self.parked}
        assert (self.queues.next(VERSION_ID, 0.0) is None) == (not self.waiting)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

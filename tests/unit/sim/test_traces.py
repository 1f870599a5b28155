"""Scaled arrivals: the list and the stream agree, and a trace repeats at its own rate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from torchrelay.sim.fleets import twelve_models
from torchrelay.sim.traces import Arrival, repeated, request_stream, requests_of

ARRIVALS = [Arrival(float(number), 100 + number, 10) for number in range(20)]


def test_request_stream_equals_request_list() -> None:
    models = twelve_models()
    stream = list(request_stream(ARRIVALS, models, 3.4, 1.0, seed=5))
    assert 50 < len(stream) < 90 and {request.request_id for request in stream} >= {"r0-0", "r19-2"}
    assert all(before.arrives_at <= after.arrives_at for before, after in pairwise(stream))
    listed = requests_of(ARRIVALS, models, 3.4, 1.0, seed=5)
    assert listed == sorted(listed, key=lambda request: (request.arrives_at, request.request_id))
    at_zero = {request.request_id: replace(request, arrives_at=0.0) for request in stream}
    assert {request.request_id: replace(request, arrives_at=0.0) for request in listed} == at_zero


def test_each_model_is_shifted_by_its_own_time() -> None:
    models, length_s = twelve_models()[:3], ARRIVALS[-1].at
    before = {request.request_id: request for request in request_stream(ARRIVALS, models, 20.0, 0.0, seed=5)}
    shifts = defaultdict[str, set[float]](set)
    for request in requests_of(ARRIVALS, models, 20.0, 0.0, seed=5):
        assert 0.0 <= request.arrives_at < length_s
        shifts[request.model].add(
            round((request.arrives_at - before[request.request_id].arrives_at) % length_s, 6) % length_s
        )
    assert [len(of_model) for of_model in shifts.values()] == [1, 1, 1]
    assert len(set.union(*shifts.values())) == 3, "three models, three shifts"
    again = requests_of(ARRIVALS, models, 20.0, 0.0, seed=5)
    assert again == requests_of(ARRIVALS, models, 20.0, 0.0, seed=5)
    assert again != requests_of(ARRIVALS, models, 20.0, 0.0, seed=6)


def test_requests_at_one_moment_are_not_shifted() -> None:
    (request,) = requests_of(ARRIVALS[:1], twelve_models(), 1.0, 1.0, seed=5)
    assert request.arrives_at == ARRIVALS[0].at
    assert requests_of([], twelve_models(), 1.0, 1.0, seed=5) == []


def test_repeated_trace_keeps_its_rate() -> None:
    arrivals = list(repeated(ARRIVALS, 50.0))
    assert [arrival.at for arrival in arrivals] == pytest.approx([float(number) for number in range(50)])
    assert arrivals[20].num_prompt_tokens == arrivals[40].num_prompt_tokens == ARRIVALS[0].num_prompt_tokens
    assert len(list(repeated(ARRIVALS[:1], 50.0))) == 1, "a single arrival has no rate"

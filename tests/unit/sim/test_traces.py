"""Scaled arrivals: the list and the stream agree, and a trace repeats at its own rate."""

from __future__ import annotations

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
    by_time = sorted(stream, key=lambda request: (request.arrives_at, request.request_id))
    assert by_time == requests_of(ARRIVALS, models, 3.4, 1.0, seed=5)


def test_repeated_trace_keeps_its_rate() -> None:
    arrivals = list(repeated(ARRIVALS, 50.0))
    assert [arrival.at for arrival in arrivals] == pytest.approx([float(number) for number in range(50)])
    assert arrivals[20].num_prompt_tokens == arrivals[40].num_prompt_tokens == ARRIVALS[0].num_prompt_tokens
    assert len(list(repeated(ARRIVALS[:1], 50.0))) == 1, "a single arrival has no rate"

"""Arrivals brought to a size: as a list and as a stream they are the same, and a trace repeats at its own pace."""

from __future__ import annotations

from itertools import pairwise

import pytest

from torchrelay.sim.fleets import twelve_models
from torchrelay.sim.traces import Arrival, repeated, request_stream, requests_of

ARRIVALS = [Arrival(float(number), 100 + number, 10) for number in range(20)]


def test_a_stream_has_the_requests_of_the_list_in_order() -> None:
    models = twelve_models()
    stream = list(request_stream(ARRIVALS, models, 3.4, 1.0, seed=5))
    assert 50 < len(stream) < 90 and {one.request_id for one in stream} >= {"r0-0", "r19-2"}
    assert all(one.arrives_at <= other.arrives_at for one, other in pairwise(stream))
    assert sorted(stream, key=lambda one: one.request_id) == sorted(
        requests_of(ARRIVALS, models, 3.4, 1.0, seed=5), key=lambda one: one.request_id
    )


def test_a_trace_repeats_at_its_own_pace() -> None:
    found = list(repeated(ARRIVALS, 50.0))
    assert [one.at for one in found] == pytest.approx([float(number) for number in range(50)])
    assert found[20].num_prompt_tokens == found[40].num_prompt_tokens == ARRIVALS[0].num_prompt_tokens
    assert len(list(repeated(ARRIVALS[:1], 50.0))) == 1, "one arrival has no pace"

"""How long a load is expected to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.estimates.latency import load_s
from torchrelay.scheduler.policy.estimates.load_times import LoadTimes


def test_loads_are_expected_as_those_like_them_were_measured() -> None:
    times, config, model = LoadTimes(), PolicyConfig(), a_model()
    assert times.predict_s(model, Tier.HOST, config) == load_s(model.pack_bytes, Tier.HOST, config)
    times.begin("i", model, Tier.HOST)
    times.end("i", 8.0)
    assert times.predict_s(model, Tier.HOST, config) == pytest.approx(8.0)
    assert times.predict_s(replace(model, pack_bytes=2 * model.pack_bytes), Tier.HOST, config) == pytest.approx(16.0)
    assert times.predict_s(model, Tier.PEER, config) == load_s(model.pack_bytes, Tier.PEER, config)
    four = replace(model, num_devices=4)
    assert times.predict_s(four, Tier.HOST, config) == pytest.approx(8.0), "nothing is known of four devices yet"
    times.begin("of four", four, Tier.HOST)
    times.end("of four", 4.0)
    assert times.predict_s(four, Tier.HOST, config) == pytest.approx(4.0)
    assert times.predict_s(model, Tier.HOST, config) == pytest.approx(8.0)
    for number in range(20):
        times.begin(f"i{number}", model, Tier.HOST)
        times.end(f"i{number}", 2.0)
    assert times.predict_s(model, Tier.HOST, config) == pytest.approx(2.0, rel=0.01)


def test_failed_load_teaches_nothing() -> None:
    times, config, model = LoadTimes(), PolicyConfig(), a_model()
    times.begin("i", model, Tier.HOST)
    times.end("i")
    times.end("i", 100.0)
    assert times.predict_s(model, Tier.HOST, config) == load_s(model.pack_bytes, Tier.HOST, config)

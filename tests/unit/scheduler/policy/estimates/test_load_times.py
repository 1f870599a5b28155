"""How long a load is expected to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.estimates.latency import load_s
from torchrelay.scheduler.policy.estimates.load_times import LoadTimes
from torchrelay.scheduler.policy.types import REMOTE


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


def test_load_that_shared_a_link_shows_a_least_rate_only() -> None:
    """Twelve loads at once made the next single load look several times slower, which suppressed growth."""
    times, config = LoadTimes(), PolicyConfig()
    models = [a_model(f"acme/m{number}") for number in range(12)]
    for number, model in enumerate(models):
        times.begin(f"i{number}", model, Tier.REMOTE, frozenset((f"store-{number}", REMOTE)))
    for number in range(12):
        times.end(f"i{number}", 24.0)
    assert times.predict_s(models[0], Tier.REMOTE, config) == load_s(models[0].pack_bytes, Tier.REMOTE, config)
    times.begin("alone", models[0], Tier.REMOTE, frozenset(("store-0", REMOTE)))
    times.end("alone", 3.0)
    assert times.predict_s(models[0], Tier.REMOTE, config) == pytest.approx(3.0)
    for name, took_s in (("slower", 9.0), ("faster", 1.0)):
        times.begin("other", models[1], Tier.PEER, frozenset(("store-1", "store-2")))
        times.begin(name, models[0], Tier.REMOTE, frozenset(("store-1", REMOTE)))
        times.end("other")
        times.end(name, took_s)
    assert times.predict_s(models[0], Tier.REMOTE, config) == pytest.approx(3.0**0.7)


def test_instances_of_a_pack_share_its_transfer() -> None:
    times, config, model = LoadTimes(), PolicyConfig(), a_model()
    for name in ("a", "b"):
        times.begin(name, model, Tier.PEER, frozenset(("store-1", "store-2")))
    times.end("a", 5.0)
    assert times.predict_s(model, Tier.PEER, config) == pytest.approx(5.0)

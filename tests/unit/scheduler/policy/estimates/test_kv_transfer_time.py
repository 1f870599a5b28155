"""KV transfer times: learned by pair of hosts, from releases."""

from __future__ import annotations

from itertools import product

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, two_hosts
from torchrelay.scheduler.policy.estimates.kv_transfer_time import KvTransferTimes
from torchrelay.scheduler.policy.inputs import Release
from torchrelay.scheduler.policy.prediction import Outcome


def test_hand_overs_are_learned_by_pair_of_hosts() -> None:
    kv_transfer_times = KvTransferTimes()
    for kv_bytes in (1 << 20, 4 << 20, 16 << 20, 64 << 20) * 25:
        kv_transfer_times.observe("a", "b", kv_bytes, 0.001 + kv_bytes / 1e9)
    assert kv_transfer_times.predict_s("a", "b", 32 << 20, 5e8) == pytest.approx(0.001 + (32 << 20) / 1e9, rel=0.05)
    assert kv_transfer_times.predict_s("b", "a", 10_000_000, 5e8) == pytest.approx(0.003), "the default"
    kv_transfer_times.observe("c", "d", 0, 0.0)
    assert kv_transfer_times.predict_s("c", "d", 0, 5e8) > 0


def test_ten_thousand_host_pairs_are_remembered() -> None:
    kv_transfer_times = KvTransferTimes()
    for prefill, decode in product(range(100), range(100)):
        kv_transfer_times.observe(f"p{prefill}", f"d{decode}", 1 << 20, 0.25)
    assert kv_transfer_times.predict_s("p0", "d0", 1 << 20, 5e8) == pytest.approx(0.25)


def test_release_teaches_kv_transfer_time() -> None:
    scene, model = two_hosts(), a_model()
    admission = scene.admit(model, "r1")
    scene.finish_loads()
    assert scene.placement("r1") is not None
    before = scene.policy.state.kv_transfer_times.predict_s("host-1", "host-2", 102_400, 5e8)
    scene.apply(Release(admission.key, True, Outcome(kv_transfer_s=0.25)))
    after = scene.policy.state.kv_transfer_times.predict_s("host-1", "host-2", 102_400, 5e8)
    assert before < 0.01 and after == pytest.approx(0.25)

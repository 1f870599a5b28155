"""Which latency model counts for a worker: its own, one of its kind, or the default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, a_worker
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.estimates.latency import LatencyModels, load_left_s
from torchrelay.scheduler.policy.types import BOTH, Instance, InstancePhase, SlotStatus, WorkerStatus

RULES = PolicyConfig(default_prefill_tokens_per_s=1000.0, default_step_s=0.03)
MODEL = a_model()
FAST = LatencyModel(StepCost(0.01, 1e-4, 0, 50), StepCost(0.005, 1e-4, 0, 50), token_budget=256)
SLOT = SlotStatus(InstancePhase.READY, "i", MODEL.name, MODEL.version_id, MODEL.pack_id)


def worker_with(
    latency: LatencyModel | None, worker_id: str = "w", device: str = "cpu", slot: SlotStatus = SLOT
) -> WorkerStatus:
    return a_worker(worker_id, slot=slot, device=device, latency=latency)


def test_rates_and_defaults_replace_missing_measurements() -> None:
    guess = LatencyModels().of(worker_with(None), MODEL.pack_id, RULES)
    assert guess.prefill_s(500) == pytest.approx(0.5)
    assert guess.tbt_s(8, 1000) == pytest.approx(0.06)
    measured = replace(worker_with(None), prefill_tokens_per_s=5000.0, step_s=0.01)
    assert LatencyModels().of(measured, MODEL.pack_id, RULES).prefill_s(500) == pytest.approx(0.1)


def test_new_worker_uses_model_of_same_device() -> None:
    latency_models = LatencyModels()
    latency_models.observe(worker_with(FAST))
    free = worker_with(None, "w2", slot=SlotStatus())
    assert latency_models.of(free, MODEL.pack_id, RULES) == FAST
    assert latency_models.of(replace(free, device="cuda"), MODEL.pack_id, RULES) != FAST
    assert latency_models.of(free, "another pack", RULES) != FAST


def test_own_model_counts_after_enough_steps() -> None:
    latency_models = LatencyModels()
    latency_models.observe(worker_with(FAST))
    slow = LatencyModel(StepCost(0.1, 1e-3, 0, 7), StepCost(0.05, 1e-3, 0, 8))
    latency = latency_models.of(worker_with(slow, "w2"), MODEL.pack_id, RULES)
    assert latency.prefill == FAST.prefill, "seven steps may all have been the first ones"
    assert latency.decode == slow.decode
    few = LatencyModel(StepCost(0.1, 1e-3, 0, 1))
    assert LatencyModels().of(worker_with(few), MODEL.pack_id, RULES).prefill == few.prefill, "better than a guess"


def test_each_step_kind_is_learned_from_any_worker() -> None:
    latency_models = LatencyModels()
    latency_models.observe(worker_with(LatencyModel(FAST.prefill, token_budget=256), "prefills"))
    latency_models.observe(worker_with(LatencyModel(decode=FAST.decode), "decodes"))
    assert latency_models.of(worker_with(None, slot=SlotStatus()), MODEL.pack_id, RULES) == FAST


def test_model_of_earlier_pack_is_ignored() -> None:
    other = worker_with(FAST, slot=replace(SLOT, pack_id="another"))
    assert LatencyModels().of(other, MODEL.pack_id, RULES) != FAST


def test_overdue_load_is_expected_later_and_later() -> None:
    """P4: it said a tenth of the whole time for ever, so requests went on being sent there."""
    loading = Instance("i", "m", "v", "p", "w", "w", "h", BOTH, InstancePhase.LOADING, since=0.0, created_at=100.0)
    left_s = [load_left_s(loading, 10.0, 100.0 + elapsed_s) for elapsed_s in (0.0, 6.0, 10.0, 15.0, 60.0)]
    assert left_s == [10.0, 4.0, 1.0, 5.0, 50.0]


def test_load_left_follows_bytes_and_shrinks_between_layers() -> None:
    loading = Instance("i", "m", "v", "p", "w", "w", "h", BOTH, InstancePhase.LOADING, since=0.0, created_at=100.0)
    quarter = replace(loading, num_layers_ready=1, num_layers=8, loaded_share=0.25, progressed_at=102.0)
    left_s = [load_left_s(quarter, 10.0, now) for now in (102.0, 103.0, 104.0, 107.0, 110.0)]
    assert left_s == pytest.approx([6.0, 5.0, 4.0, 1.0, 2.0])

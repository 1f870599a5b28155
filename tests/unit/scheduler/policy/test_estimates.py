"""Predictions: latency models, loads, batches, lengths of answers, cached prompts, and corrections by measurements."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, a_worker, an_instance, one_host, two_hosts
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch.backlogs import prompts_s
from torchrelay.scheduler.policy.estimates.correction import TBT_WEIGHT, TTFT_WEIGHT, Correction
from torchrelay.scheduler.policy.estimates.kv_transfer_time import KvTransferTimes
from torchrelay.scheduler.policy.estimates.latency import LatencyModels, load_s
from torchrelay.scheduler.policy.estimates.load_times import LoadTimes
from torchrelay.scheduler.policy.estimates.requests import CachedShare
from torchrelay.scheduler.policy.estimates.token_time import TokenTime
from torchrelay.scheduler.policy.inputs import FirstToken, Release
from torchrelay.scheduler.policy.prediction import Outcome, outcome_of
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.timed_phase import TimedPhase
from torchrelay.scheduler.policy.types import REMOTE, AttemptKey, InstancePhase, SlotStatus, WorkerStatus

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


def test_overdue_load_is_expected_later_and_later() -> None:
    """P4: it said a tenth of the whole time for ever, so requests went on being sent there."""
    loading = an_instance(MODEL, a_worker("w"), phase=InstancePhase.LOADING, created_at=100.0)
    left_s = [loading.predict_load_s(10.0, 100.0 + elapsed_s) for elapsed_s in (0.0, 6.0, 10.0, 15.0, 60.0)]
    assert left_s == [10.0, 4.0, 1.0, 5.0, 50.0]


def test_load_left_follows_bytes_and_shrinks_between_layers() -> None:
    loading = an_instance(MODEL, a_worker("w"), phase=InstancePhase.LOADING, created_at=100.0)
    quarter = replace(loading, num_layers_ready=1, num_layers=8, loaded_share=0.25, progressed_at=102.0)
    left_s = [quarter.predict_load_s(10.0, now) for now in (102.0, 103.0, 104.0, 107.0, 110.0)]
    assert left_s == pytest.approx([6.0, 5.0, 4.0, 1.0, 2.0])


def test_loads_are_expected_as_those_like_them_were_measured() -> None:
    times, config, model = LoadTimes(), PolicyConfig(), a_model()
    assert times.predict_s(model, Tier.HOST, config) == load_s(model.pack_bytes, Tier.HOST, config)
    times.begin("fails", model, Tier.HOST)
    times.end("fails")
    times.end("fails", 100.0)
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


def test_usual_batch_counts_less_with_age() -> None:
    times = TokenTime()
    times.placed(0.01, now=0.0)
    assert times.mean_s(0.02, now=0.0) == pytest.approx(0.017)
    assert times.mean_s(0.02, now=120.0) == pytest.approx(0.0185)
    assert times.mean_s(0.02, now=3600.0) == pytest.approx(0.02)
    assert TokenTime().mean_s(0.02, now=0.0) == 0.02


def test_burst_does_not_change_usual_step() -> None:
    """Twenty placements at once were two thirds of it."""
    times = TokenTime()
    for number in range(400):
        times.placed(0.01, now=0.1 * number)
    for _ in range(20):
        times.placed(0.04, now=40.0)
    assert times.mean_s(0.01, now=40.0) < 0.011
    for number in range(400):
        times.placed(0.04, now=100.0 + 0.1 * number)
    assert times.mean_s(0.04, now=140.0) > 0.038


@pytest.mark.parametrize("true", [1.0, 1.5])
@pytest.mark.parametrize("weight", [TTFT_WEIGHT, TBT_WEIGHT])
def test_noise_is_not_corrected(true: float, weight: float) -> None:
    """Where steps take 40% more or less at random, the mean of the last few is itself off by 11%; that much was added
    to the error of each prediction.
    """
    rng, correction, factors = random.Random(2), Correction(weight), []
    for number in range(600):
        factor, now = correction.factor(number * 0.1), number * 0.1
        factors.append(factor)
        correction.observe(factor, factor, true * math.exp(rng.gauss(0.0, 0.4)), now)
    assert median(abs(math.log(factor / true)) for factor in factors[100:]) < (0.02 if true == 1.0 else 0.1)


@pytest.mark.parametrize("times", [3.0, 20.0])
def test_slower_worker_is_avoided_after_twenty_prompts(times: float) -> None:
    rng, correction = random.Random(3), Correction(TTFT_WEIGHT)
    for number in range(220):
        slow = times if number >= 200 else 1.0
        factor = correction.factor(number)
        correction.observe(factor, factor, slow * math.exp(rng.gauss(0.0, 0.3)), number)
    assert correction.factor(220.0) > 0.7 * min(times, 8.0)


def test_correction_fades_until_instance_is_tried_again() -> None:
    correction = Correction(TTFT_WEIGHT)
    for _ in range(200):
        factor = correction.factor(0.0)
        correction.observe(factor, factor, 100.0, now=0.0)
    factors = [correction.factor(now) for now in (0.0, 120.0, 240.0, 3600.0)]
    assert factors == pytest.approx([8.0, 8.0**0.5, 8.0**0.25, 1.0], rel=1e-3)


def test_hand_overs_are_learned_by_pair_of_hosts() -> None:
    kv_transfer_times = KvTransferTimes()
    for kv_bytes in (1 << 20, 4 << 20, 16 << 20, 64 << 20) * 25:
        kv_transfer_times.observe("a", "b", kv_bytes, 0.001 + kv_bytes / 1e9)
    assert kv_transfer_times.predict_s("a", "b", 32 << 20, 5e8) == pytest.approx(0.001 + (32 << 20) / 1e9, rel=0.05)
    assert kv_transfer_times.predict_s("b", "a", 10_000_000, 5e8) == pytest.approx(0.003), "the default"
    kv_transfer_times.observe("c", "d", 0, 0.0)
    assert kv_transfer_times.predict_s("c", "d", 0, 5e8) > 0


def test_release_teaches_kv_transfer_time() -> None:
    scene, model = two_hosts(), a_model()
    admission = scene.admit(model, "r1")
    scene.finish_loads()
    assert scene.placement("r1") is not None
    before = scene.policy.state.kv_transfer_times.predict_s("host-1", "host-2", 102_400, 5e8)
    scene.apply(Release(admission.key, True, Outcome(kv_transfer_s=0.25)))
    after = scene.policy.state.kv_transfer_times.predict_s("host-1", "host-2", 102_400, 5e8)
    assert before < 0.01 and after == pytest.approx(0.25)


def test_cached_share_is_by_tokens() -> None:
    cached = CachedShare()
    assert cached.uncached == 1.0
    cached.observe(900, 600)
    cached.observe(100, 0)
    assert cached.uncached == pytest.approx(0.4)


@pytest.mark.parametrize(("block_hashes", "grows"), [((), True), ((b"1", b"2"), False)], ids=["new", "cached"])
def test_growth_counts_uncached_prompt_tokens(block_hashes: tuple[bytes, ...], grows: bool) -> None:
    """Conversations, whose prompts are cached but for the last words, seemed to need several times what they used."""
    model = a_model("acme/chat", max_instances=4, routing_block_tokens=48)
    workers = [a_worker(f"w-{number}", has_prefix_cache=True) for number in range(4)]
    scene = one_host(*workers)
    for number in range(150):  # 30 a second, of 0.1 s each if nothing is cached
        scene.admit(model, f"r{number}", num_prompt_tokens=100, block_hashes=block_hashes)
        scene.pass_time(0.03, 0.01)
        scene.finish_loads()
        scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        scene.release(f"r{number}")
    assert (len(scene.policy.state.instances.of_version(model.version_id)) > 1) == grows


def test_after_scale_to_zero_a_crowd_counts_whole() -> None:
    """Nothing is cached on an instance that loads: growth saw a twenty-fifth of the queue."""
    model = a_model("acme/chat", max_instances=4, routing_block_tokens=48, idle_timeout_s=1.0)
    workers = [a_worker(f"w-{number}", has_prefix_cache=True) for number in range(4)]
    scene = one_host(*workers)
    for number in range(20):
        scene.serve(model, f"r{number}", num_prompt_tokens=100, block_hashes=(b"1", b"2"))
        scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        scene.release(f"r{number}")
    assert prompts_s(scene.policy.state, model, 10_000, scene.now) < 1.0
    scene.pass_time(2.0)
    assert not scene.policy.state.instances.of_version(model.version_id)
    assert prompts_s(scene.policy.state, model, 10_000, scene.now) == pytest.approx(10.0)


SMALL_KV = a_model(kv_bytes_per_token=64)
STEPS = LatencyModel(StepCost(0.01, 1e-4, 0, 50), StepCost(0.005, 1e-4, 1e-6, 50))


def test_tbt_uses_mean_length_and_kv_the_maximum() -> None:
    """P10: every choice was taken to attend to all the positions that it may ever have."""
    scene = one_host(a_worker("w", latency=STEPS))
    scene.serve(SMALL_KV, "cold")
    scene.release("cold", delivered=False)
    attempts = scene.policy.state.attempts

    def predicted_step_s(request_id: str) -> float:
        """For a request that may have a very long answer, and then has one of 20 tokens for each of its choices."""
        admission = scene.admit(SMALL_KV, request_id, max_tokens=100_000, num_choices=2)
        scene.apply(FirstToken(admission.key))
        placement = scene.placed(request_id)
        assert attempts.work_of(placement.decode.instance_id).kv_bytes == admission.kv_bytes(SMALL_KV)
        scene.apply(Release(admission.key, True, Outcome(num_output_tokens=40)))
        return placement.predicted.step_s

    steps_s = [predicted_step_s(f"r{number}") for number in range(9)]
    assert steps_s[:8] == pytest.approx([STEPS.tbt_s(2, 2 * (100 + 50_000))] * 8)
    assert steps_s[8] == pytest.approx(STEPS.tbt_s(2, 2 * (100 + 10)))
    scene.check()


MS = 1000


@pytest.mark.parametrize("skew_us", [0, -3_600_000_000, 50 * MS])
def test_outcome_is_independent_of_clock_skew(skew_us: int) -> None:
    phases = [
        TimedPhase("queue", 0, 5 * MS),
        TimedPhase("first_token", 5 * MS, 105 * MS),
        TimedPhase("decode", 105 * MS, 305 * MS),
        TimedPhase("prefill", 10 * MS, 100 * MS, "w-a"),
        TimedPhase("kv", 10 * MS + skew_us, 103 * MS + skew_us, "w-b"),
    ]
    outcome = outcome_of(phases, num_output_tokens=11, num_choices=1)
    assert outcome.ttft_s == pytest.approx(0.1)
    assert outcome.tbt_s == pytest.approx(0.02)
    assert outcome.kv_transfer_s == pytest.approx(0.003)
    assert outcome.ended_at == pytest.approx(0.305)
    assert outcome_of(phases, num_output_tokens=22, num_choices=2).tbt_s == pytest.approx(0.02)


def test_missing_phases_give_no_measurement() -> None:
    assert outcome_of([], 0, 1) == Outcome()
    phases = [TimedPhase("first_token", 0, MS), TimedPhase("decode", MS, MS)]
    assert outcome_of(phases, 1, 1).tbt_s is None
    late_offer = [TimedPhase("prefill", 0, 9 * MS), TimedPhase("kv", 1 * MS, 9 * MS)]
    assert outcome_of(late_offer, 1, 1).kv_transfer_s == 0.0

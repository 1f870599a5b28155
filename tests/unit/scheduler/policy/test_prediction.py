"""What was measured of an attempt, from the phases of its release; and what a hand-over takes, from those."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import Scene, a_model, a_store, a_worker
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import Role
from torchrelay.scheduler.policy.dispatch.kv_transfer_time import KvTransferTimes
from torchrelay.scheduler.policy.dispatch.prefix_index import PrefixIndex
from torchrelay.scheduler.policy.inputs import Release
from torchrelay.scheduler.policy.prediction import Outcome, outcome_of
from torchrelay.scheduler.policy.timed_phase import TimedPhase

MS = 1000


@pytest.mark.parametrize("skew_us", [0, -3_600_000_000, 50 * MS])
def test_phases_give_the_outcome_however_far_two_hosts_clocks_are_apart(skew_us: int) -> None:
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


def test_what_did_not_happen_was_not_measured() -> None:
    assert outcome_of([], 0, 1) == Outcome()
    one = [TimedPhase("first_token", 0, MS), TimedPhase("decode", MS, MS)]
    assert outcome_of(one, 1, 1).tbt_s is None
    late_offer = [TimedPhase("prefill", 0, 9 * MS), TimedPhase("kv", 1 * MS, 9 * MS)]
    assert outcome_of(late_offer, 1, 1).kv_transfer_s == 0.0


def test_hand_overs_are_learned_by_pair_of_hosts() -> None:
    kv_transfer_times = KvTransferTimes()
    for kv_bytes in (1 << 20, 4 << 20, 16 << 20, 64 << 20) * 25:
        kv_transfer_times.observe("a", "b", kv_bytes, 0.001 + kv_bytes / 1e9)
    assert kv_transfer_times.predict_s("a", "b", 32 << 20, 5e8) == pytest.approx(0.001 + (32 << 20) / 1e9, rel=0.05)
    assert kv_transfer_times.predict_s("b", "a", 10_000_000, 5e8) == pytest.approx(0.003), "the default"
    kv_transfer_times.observe("c", "d", 0, 0.0)
    assert kv_transfer_times.predict_s("c", "d", 0, 5e8) > 0


def two_hosts() -> Scene:
    scene = Scene(PolicyConfig())
    prefill, decode = frozenset((Role.PREFILL,)), frozenset((Role.DECODE,))
    return scene.settle(
        a_store("store-1", "host-1"),
        a_store("store-2", "host-2"),
        a_worker("p", "host-1", prefill, has_prefix_cache=True),
        a_worker("d", "host-2", decode),
    )


def test_a_release_teaches_the_policy_how_long_the_hand_over_took() -> None:
    scene, model = two_hosts(), a_model()
    admission = scene.admit(model, "r1")
    scene.finish_loads()
    assert scene.placement("r1") is not None
    before = scene.policy.state.kv_transfer_times.predict_s("host-1", "host-2", 102_400, 5e8)
    scene.apply(Release(admission.key, True, Outcome(kv_transfer_s=0.25)))
    after = scene.policy.state.kv_transfer_times.predict_s("host-1", "host-2", 102_400, 5e8)
    assert before < 0.01 and after == pytest.approx(0.25)


def test_the_batch_of_a_step_is_counted_in_choices() -> None:
    scene, model = two_hosts(), a_model()
    admission = scene.admit(model, "r1", num_choices=5)
    scene.finish_loads()
    scene.admit(model, "r2", num_choices=2)
    (first, second), reservations = (scene.placement("r1"), scene.placement("r2")), scene.policy.state.reservations
    assert first is not None and second is not None
    instance_id = first.decode.instance_id
    assert (reservations.num_decoding(instance_id), reservations.num_choices(instance_id)) == (2, 7)
    assert second.predicted.tbt_s > first.predicted.tbt_s
    reservations.check_integrity({})
    scene.apply(Release(admission.key, True))
    assert (reservations.num_decoding(instance_id), reservations.num_choices(instance_id)) == (1, 2)


def test_a_prompt_that_begins_like_one_before_is_thought_cached_where_that_went() -> None:
    scene, model = two_hosts(), a_model(routing_block_tokens=64)
    hashes = (b"1", b"2", b"3")
    scene.admit(model, "r1", num_prompt_tokens=200, block_hashes=hashes)
    scene.finish_loads()
    scene.admit(model, "r2", num_prompt_tokens=200, block_hashes=(b"1", b"2", b"x"))
    first, second = scene.placement("r1"), scene.placement("r2")
    assert first is not None and second is not None
    assert (first.predicted.num_cached_tokens, second.predicted.num_cached_tokens) == (0, 128)
    assert second.predicted.prefill_s < first.predicted.prefill_s
    scene.kill("p")
    assert scene.policy.state.prefix_index.num_blocks(first.prefill.instance_id, hashes) == 0


def test_of_prefixes_the_longest_unused_blocks_go_first_and_ends_before_beginnings() -> None:
    prefix_index = PrefixIndex()
    prefix_index.note("i", (b"1", b"2", b"3"), 4)
    prefix_index.note("i", (b"1", b"x"), 4)
    assert prefix_index.num_blocks("i", (b"1", b"2", b"3")) == 3
    prefix_index.note("i", (b"y",), 4)
    assert prefix_index.num_blocks("i", (b"1", b"2", b"3")) == 2
    assert prefix_index.num_blocks("i", (b"1", b"x")) == 2
    assert prefix_index.num_blocks("i", (b"2",)) == 1 and prefix_index.num_blocks("i", ()) == 0
    assert prefix_index.num_blocks("another", (b"1",)) == 0

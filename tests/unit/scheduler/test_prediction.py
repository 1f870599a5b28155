"""What was measured of an attempt, from the phases of its release; and what a hand-over takes, from those."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.scene import Scene, a_model, a_store, a_worker
from torchrelay.scheduler.core import Role
from torchrelay.scheduler.handovers import Handovers
from torchrelay.scheduler.measured import Measured
from torchrelay.scheduler.prediction import Outcome, outcome_of
from torchrelay.scheduler.rules import Rules
from torchrelay.scheduler.warm_prefixes import WarmPrefixes

MS = 1000


def test_phases_tell_the_outcome() -> None:
    phases = [
        Measured("queue", 0, 5 * MS),
        Measured("first_token", 5 * MS, 105 * MS),
        Measured("decode", 105 * MS, 305 * MS),
        Measured("prefill", 10 * MS, 100 * MS, "w-a"),
        Measured("kv", 12 * MS, 103 * MS, "w-b"),
    ]
    outcome = outcome_of(phases, num_output_tokens=11, num_choices=1)
    assert outcome.ttft_s == pytest.approx(0.1)
    assert outcome.tbt_s == pytest.approx(0.02)
    assert outcome.handover_s == pytest.approx(0.003)
    assert outcome.ended_at == pytest.approx(0.305)
    assert outcome_of(phases, num_output_tokens=22, num_choices=2).tbt_s == pytest.approx(0.02)


def test_what_did_not_happen_was_not_measured() -> None:
    assert outcome_of([], 0, 1) == Outcome()
    one = [Measured("first_token", 0, MS), Measured("decode", MS, MS)]
    assert outcome_of(one, 1, 1).tbt_s is None
    skewed = [Measured("prefill", 0, 9 * MS), Measured("kv", 0, 8 * MS)]
    assert outcome_of(skewed, 1, 1).handover_s == 0.0, "two hosts' clocks"


def test_hand_overs_are_learned_by_pair_of_hosts() -> None:
    handovers = Handovers()
    for kv_bytes in (1 << 20, 4 << 20, 16 << 20, 64 << 20) * 25:
        handovers.observe("a", "b", kv_bytes, 0.001 + kv_bytes / 1e9)
    assert handovers.predict_s("a", "b", 32 << 20, 5e8) == pytest.approx(0.001 + (32 << 20) / 1e9, rel=0.05)
    assert handovers.predict_s("b", "a", 10_000_000, 5e8) == pytest.approx(0.003), "the default"
    handovers.observe("c", "d", 0, 0.0)
    assert handovers.predict_s("c", "d", 0, 5e8) > 0


def two_hosts() -> Scene:
    scene = Scene(Rules())
    prefill, decode = frozenset((Role.PREFILL,)), frozenset((Role.DECODE,))
    return scene.settle(
        a_store("store-1", "host-1"),
        a_store("store-2", "host-2"),
        a_worker("p", "host-1", prefill, keeps_prefixes=True),
        a_worker("d", "host-2", decode),
    )


def test_a_release_teaches_the_policy_how_long_the_hand_over_took() -> None:
    scene, model = two_hosts(), a_model()
    admission = scene.admit(model, "r1")
    scene.finish_loads()
    assert scene.placement("r1") is not None
    before = scene.policy.state.handovers.predict_s("host-1", "host-2", 102_400, 5e8)
    scene.do(scene.policy.release(admission.key, True, scene.now, Outcome(handover_s=0.25)))
    after = scene.policy.state.handovers.predict_s("host-1", "host-2", 102_400, 5e8)
    assert before < 0.01 and after == pytest.approx(0.25)


def test_the_batch_of_a_step_is_counted_in_choices() -> None:
    scene, model = two_hosts(), a_model()
    admission = scene.admit(model, "r1", num_choices=5)
    scene.finish_loads()
    scene.admit(model, "r2", num_choices=2)
    (first, second), books = (scene.placement("r1"), scene.placement("r2")), scene.policy.state.books
    assert first is not None and second is not None
    instance_id = first.decode.instance_id
    assert (books.num_decoding(instance_id), books.num_choices(instance_id)) == (2, 7)
    assert second.predicted.tbt_s > first.predicted.tbt_s
    books.check_integrity({})
    scene.do(scene.policy.release(admission.key, True, scene.now))
    assert (books.num_decoding(instance_id), books.num_choices(instance_id)) == (1, 2)


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
    assert scene.policy.state.prefixes.num_blocks(first.prefill.instance_id, hashes) == 0


def test_of_prefixes_the_longest_unused_blocks_go_first_and_ends_before_beginnings() -> None:
    prefixes = WarmPrefixes()
    prefixes.note("i", (b"1", b"2", b"3"), 4)
    prefixes.note("i", (b"1", b"x"), 4)
    assert prefixes.num_blocks("i", (b"1", b"2", b"3")) == 3
    prefixes.note("i", (b"y",), 4)
    assert prefixes.num_blocks("i", (b"1", b"2", b"3")) == 2
    assert prefixes.num_blocks("i", (b"1", b"x")) == 2
    assert prefixes.num_blocks("i", (b"2",)) == 1 and prefixes.num_blocks("i", ()) == 0
    assert prefixes.num_blocks("another", (b"1",)) == 0

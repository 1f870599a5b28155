"""Placement: the pair of instances with the least predicted latency that has the KV."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import DECODE, MB, PREFILL, a_model, a_worker, an_instance
from tests.unit.scheduler.policy.paper_cluster import an_admission as an_untargeted_admission
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch.placement import NoPlacement, place
from torchrelay.scheduler.policy.handlers.lifecycle import with_settings
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import (
    BOTH,
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    Placement,
    Role,
    Roles,
    WorkerRef,
)

RULES = PolicyConfig()
MODEL = a_model()


NOW = 1000.0


def an_admission(model: Model, request_id: str, **changes: object) -> Admission:
    return with_settings(structs.replace(an_untargeted_admission(model, request_id), **changes), model, RULES)


def a_candidate(
    worker_id: str,
    roles: Roles,
    load_left_s: float = 0.0,
    queued: int = 0,
    free: int = 64 * MB,
    num_decoding: int = 0,
    tokens_per_s: float = 1000.0,
    step_s: float = 0.01,
    seen: int = 0,
    hands_over: bool = True,
) -> Instance:
    """``queued`` tokens wait there; a sequence more in the batch costs an eighth of a step, 8,000 positions one.

    A full step has 512 tokens. ``num_decoding`` choices decode, each of its own attempt.
    """
    latency = LatencyModel(
        StepCost(per_position_s=1 / tokens_per_s, num_steps=100), StepCost(step_s, step_s / 8, step_s / 8000, 100)
    )
    instance = an_instance(
        MODEL, a_worker(worker_id), roles, InstancePhase.LOADING if load_left_s else InstancePhase.READY,
        worker_ref=WorkerRef(worker_id, f"{worker_id}:1", f"i-{worker_id}"), latency=latency,
        plays_prefill=Role.PREFILL in roles, plays_decode=Role.DECODE in roles, full_step_s=latency.queued_s(512),
        kv_pool_bytes=free + seen * MODEL.kv_bytes_per_token, hands_over=hands_over, loaded_at=NOW + load_left_s,
    )  # fmt: skip
    work = instance.work
    work.kv_bytes, work.num_choices, work.num_attended = seen * MODEL.kv_bytes_per_token, num_decoding, seen
    if queued:
        work.queue.add(AttemptKey("ahead", 1), queued / tokens_per_s, NOW)
    for number in range(num_decoding):
        key, ref = AttemptKey(f"other {number}", 1), instance.worker_ref
        placement = Placement(AttemptKey("", 1), ref, ref, False)
        work.decodes[key] = OpenAttempt(an_admission(MODEL, key.request_id), placement, 0.0, 0, is_computed=True)
        work.num_answers += 1
    return instance


def a_state() -> State:
    return State.fresh(RULES, lambda: "i", NOW, Strategies())


def place_at(
    admission: Admission, *instances: Instance, now: float = NOW, state: State | None = None, model: Model = MODEL
) -> Placement | NoPlacement:
    prefills = [instance for instance in instances if instance.plays_prefill]
    decodes = [instance for instance in instances if instance.plays_decode]
    return place(state or a_state(), admission, model, prefills, decodes, now)


def placement_of(*instances: Instance, state: State | None = None, **admitted: int) -> Placement:
    placement = place_at(structs.replace(an_admission(MODEL, "r1"), **admitted), *instances, state=state)
    assert isinstance(placement, Placement)
    return placement


def placed(*instances: Instance, **admitted: int) -> tuple[str, str]:
    placement = placement_of(*instances, state=None, **admitted)
    return placement.prefill.worker_id, placement.decode.worker_id


def test_queue_and_load_are_compared_by_time() -> None:
    decode, loading = a_candidate("d", DECODE), a_candidate("p2", PREFILL, load_left_s=2.0)
    assert placed(a_candidate("p1", PREFILL, queued=500), loading, decode) == ("p1", "d")
    assert placed(a_candidate("p1", PREFILL, queued=3000), loading, decode) == ("p2", "d")


def test_prompt_waits_for_soonest_instance_below_full_step() -> None:
    decode, loading = a_candidate("d", DECODE), a_candidate("p2", PREFILL, load_left_s=2.0)
    full = a_candidate("p1", PREFILL, queued=1000)
    placement = place_at(an_admission(MODEL, "r1"), full, loading, decode)
    assert isinstance(placement, NoPlacement) and not placement.is_own
    assert placement.due == pytest.approx(NOW + 1.0 - 0.512)


def test_prompt_waits_for_pause_of_answers() -> None:
    both = a_candidate("b", BOTH, num_decoding=3, seen=800)
    asked = an_admission(MODEL, "r1", num_prompt_tokens=512)
    decode_s = 0.01 * (1 + 3 / 8 + 800 / 8000)
    full_s = 0.512 + decode_s - 0.01
    first = place_at(asked, both)
    assert isinstance(first, Placement)
    pause_s = (full_s - 0.085) / (0.085 - decode_s) * decode_s
    assert first.predicted.pause_s == pytest.approx(pause_s)
    both.work.queue.add(asked.key, first.predicted.prefill_s, NOW - 0.6, pause_s)
    both.work.queue.leave(asked.key, NOW)
    placement = place_at(asked, both)
    assert isinstance(placement, NoPlacement) and placement.due == pytest.approx(NOW + pause_s - decode_s)
    assert isinstance(place_at(asked, both, now=placement.due + 1e-6), Placement)


def test_prompts_get_half_of_time_after_long_prompts() -> None:
    """One step's pause of each long prompt passed, and the rest stayed owed: each later short prompt waited a step."""
    both, now = a_candidate("b", BOTH, num_decoding=3, seen=800), NOW
    full_step_s, decode_s = both.full_step_s, both.latency.tbt_s(3, 800)

    def times(num_prompt_tokens: int, number: int) -> tuple[float, float]:
        """For how long ``number`` prompts waited, and were computed."""
        nonlocal now
        waited_s = computed_s = 0.0
        for _ in range(number):
            asked = an_admission(MODEL, f"r{now}", num_prompt_tokens=num_prompt_tokens, tbt_target_s=0.0165)
            placement = place_at(asked, both, now=now)
            if isinstance(placement, NoPlacement):
                waited_s += placement.due - now
                now = placement.due + 1e-6
                placement = place_at(asked, both, now=now)
            assert isinstance(placement, Placement)
            prefill_s = placement.predicted.prefill_s
            both.work.queue.add(asked.key, prefill_s, now, placement.predicted.pause_s)
            now, computed_s = now + prefill_s, computed_s + prefill_s
            both.work.queue.leave(asked.key, now)
        return waited_s, computed_s

    waited_s, computed_s = times(16 * 512, 20)
    assert waited_s == pytest.approx(19 * full_step_s, rel=0.05), "a full step before each"
    first_s, _ = times(51, 1)
    assert 0.0 < first_s <= full_step_s
    waited_s, computed_s = times(51, 40)
    assert 0.0 < waited_s <= computed_s + decode_s


def test_pause_follows_strictest_answer() -> None:
    """It was that of the newcomer."""

    def pause_s(*targets_s: float, newcomer_s: float = 0.0) -> float:
        both = a_candidate("b", BOTH, num_decoding=len(targets_s), seen=800)
        for attempt, target_s in zip(both.work.decodes.values(), targets_s, strict=True):
            attempt.admission = structs.replace(attempt.admission, tbt_target_s=target_s)
        asked = an_admission(MODEL, "r1", num_prompt_tokens=512, tbt_target_s=newcomer_s)
        placement = place_at(asked, both)
        assert isinstance(placement, Placement)
        return placement.predicted.pause_s

    strictest_s = pause_s(0.08, 0.08, 0.08, newcomer_s=0.08)
    assert strictest_s > pause_s(0.0, 0.0, 0.0) > pause_s(1.0, 1.0, 1.0, newcomer_s=1.0) == 0.0
    assert pause_s(1.0, 0.08, 0.0, newcomer_s=1.0) == pytest.approx(strictest_s)
    assert pause_s(1.0, 1.0, 1.0, newcomer_s=0.08) == pytest.approx(strictest_s)
    assert pause_s(0.001, 0.08, 1.0) == pytest.approx(strictest_s), "a target that no pause meets says nothing"


def test_decode_instance_meets_tbt_target_if_possible() -> None:
    prefill, quick = a_candidate("p", PREFILL), a_candidate("d1", DECODE, load_left_s=0.5)
    full = a_candidate("d2", DECODE, num_decoding=60, seen=50_000)  # 0.15 s a step; the target is 0.1 s
    assert placed(prefill, quick, full, max_tokens=200)[1] == "d1", "200 late tokens cost more than the rest of a load"
    assert placed(prefill, quick, full, max_tokens=2)[1] == "d2"
    slow = a_candidate("d1", DECODE, step_s=1.0)
    assert placed(prefill, slow, full)[1] == "d2", "where nobody keeps it, the least late one"


def test_slow_kv_transfer_is_learned_and_avoided() -> None:
    state = a_state()
    for _ in range(20):
        state.kv_transfer_times.observe("host-1", "host-1", 100 * MODEL.kv_bytes_per_token, 0.5)
    both, decode = a_candidate("b", BOTH, num_decoding=3), a_candidate("d", DECODE)
    assert placement_of(both, decode).decode.worker_id == "d"
    assert placement_of(both, decode, state=state).decode.worker_id == "b"


def test_placement_contains_prediction() -> None:
    both = a_candidate("b", BOTH, queued=200, num_decoding=1, seen=800)
    state, hashes = a_state(), (b"a", b"b")
    state.prefix_index.note("i-b", hashes[:1], 1)
    asked = an_admission(MODEL, "r1", num_prompt_tokens=164, max_tokens=36, block_hashes=hashes)
    placement = place_at(asked, both, state=state, model=replace(MODEL, routing_block_tokens=64))
    assert isinstance(placement, Placement)
    predicted = placement.predicted
    beside_s = 0.01 / 8 + 0.01 * 800 / 8000
    assert predicted.prefill_s == pytest.approx(0.1 + beside_s)
    assert predicted.ttft_s == pytest.approx(0.2 + predicted.prefill_s)
    assert predicted.tbt_s == pytest.approx(
        0.01 * (1 + 2 / 8 + (800 + 164 + 36 / 2) / 8000)
    )  # in the middle of its answer
    assert predicted.num_cached_tokens == 64


def test_why_there_is_no_place() -> None:
    admission = an_admission(MODEL, "r1")
    assert place_at(admission, a_candidate("p", PREFILL)) == NoPlacement("no instance plays decode")
    full = place_at(admission, a_candidate("b", BOTH, free=5))
    assert (
        isinstance(full, NoPlacement)
        and f"{admission.kv_bytes(MODEL):,} bytes" in full.reason
        and "5 are" in full.reason
    )
    crowded = place_at(admission, a_candidate("b", BOTH, num_decoding=RULES.max_open_per_instance))
    assert isinstance(crowded, NoPlacement)


candidates = st.builds(
    a_candidate,
    worker_id=st.uuids().map(str),
    roles=st.sampled_from([PREFILL, DECODE, BOTH]),
    load_left_s=st.sampled_from([0.0, 0.5, 3.0]),
    queued=st.integers(0, 5000),
    free=st.integers(0, 1 << 20),
    num_decoding=st.integers(0, 70),
)


@given(st.lists(candidates, max_size=6), st.integers(1, 2000), st.integers(1, 4))
def test_placement_always_has_roles_and_kv(candidates: list[Instance], tokens: int, choices: int) -> None:
    admission = an_admission(MODEL, "r1", num_prompt_tokens=tokens, num_choices=choices)
    placement = place_at(admission, *candidates)
    by_worker = {candidate.worker_id: candidate for candidate in candidates}
    fits = [
        candidate
        for candidate in candidates
        if candidate.kv_unreserved_bytes >= admission.kv_bytes(MODEL) and len(candidate.work.decodes) < 64
    ]
    prefills = [candidate for candidate in candidates if candidate.plays_prefill]
    if isinstance(placement, NoPlacement):
        is_full = any(each.ahead_s(NOW) >= each.full_step_s for each in prefills)
        assert is_full or not prefills or not any(candidate.plays_decode for candidate in fits)
        assert not is_full or placement.due > NOW
        return
    prefill, decode = by_worker[placement.prefill.worker_id], by_worker[placement.decode.worker_id]
    assert prefill.plays_prefill and decode.plays_decode and decode in fits
    assert prefill.ahead_s(NOW) < prefill.full_step_s, "nothing is dispatched that cannot begin"
    assert placement.cold == bool(prefill.load_left_s(NOW) or decode.load_left_s(NOW))

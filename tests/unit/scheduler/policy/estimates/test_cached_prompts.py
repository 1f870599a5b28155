"""How much of a model's prompts is left to compute."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.estimates.cached_prompts import CachedPrompts
from torchrelay.scheduler.policy.handlers.backlogs import prompts_s
from torchrelay.scheduler.policy.inputs import FirstToken
from torchrelay.scheduler.policy.types import MAX_VERSIONS, AttemptKey


def test_unknown_version_has_no_cached_share() -> None:
    assert CachedPrompts().uncached_share("v") == 1.0


def test_cached_share_is_by_tokens() -> None:
    cached = CachedPrompts()
    cached.observe("v", 900, 600)
    cached.observe("v", 100, 0)
    assert cached.uncached_share("v") == pytest.approx(0.4)
    assert cached.uncached_share("another") == 1.0


def test_latest_versions_are_remembered_until_forgotten() -> None:
    cached = CachedPrompts()
    cached.observe("v", 100, 60)
    for number in range(MAX_VERSIONS):
        cached.observe(f"other {number}", 100, 0)
        if number % 1000 == 0:
            cached.observe("v", 100, 60)
    assert cached.uncached_share("v") == pytest.approx(0.4)
    cached.forget("v")
    assert cached.uncached_share("v") == 1.0


def test_recent_prompts_count_more() -> None:
    cached = CachedPrompts()
    for num_cached in [0] * 1000 + [90] * 300:
        cached.observe("v", 100, num_cached)
    assert cached.uncached_share("v") == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(("block_hashes", "grows"), [((), True), ((b"1", b"2"), False)], ids=["new", "cached"])
def test_growth_counts_uncached_prompt_tokens(block_hashes: tuple[bytes, ...], grows: bool) -> None:
    """Conversations, whose prompts are cached but for the last words, seemed to need several times what they used."""
    model = a_model("acme/chat", max_instances=4, routing_block_tokens=48)
    workers = [a_worker(f"w-{number}", has_prefix_cache=True) for number in range(4)]
    scene = PaperCluster().settle(a_store("store-1", "host-1"), *workers)
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
    scene = PaperCluster().settle(a_store("store-1", "host-1"), *workers)
    for number in range(20):
        scene.admit(model, f"r{number}", num_prompt_tokens=100, block_hashes=(b"1", b"2"))
        scene.finish_loads()
        scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        scene.release(f"r{number}")
    assert prompts_s(scene.policy.state, model, 10_000, scene.now) < 1.0
    scene.pass_time(2.0)
    assert not scene.policy.state.instances.of_version(model.version_id)
    assert prompts_s(scene.policy.state, model, 10_000, scene.now) == pytest.approx(10.0)

"""Cached prefixes: expected where prompts that begin alike were placed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.paper_cluster import a_model, two_hosts
from torchrelay.scheduler.policy.dispatch.prefix_index import PrefixIndex
from torchrelay.scheduler.policy.inputs import FirstToken
from torchrelay.scheduler.policy.types import SlotStatus


def test_common_prefix_counts_as_cached_at_earlier_instance() -> None:
    scene, model = two_hosts(), a_model(routing_block_tokens=64)
    hashes = (b"1", b"2", b"3")
    admission = scene.admit(model, "r1", num_prompt_tokens=200, block_hashes=hashes)
    scene.finish_loads()
    first = scene.placement("r1")
    assert first is not None
    instance_id, index = first.prefill.instance_id, scene.policy.state.prefix_index
    assert index.num_blocks(instance_id, hashes) == 0, "nothing is cached before it is computed"
    scene.apply(FirstToken(admission.key))
    scene.admit(model, "r2", num_prompt_tokens=200, block_hashes=(b"1", b"2", b"x"))
    second = scene.placement("r2")
    assert second is not None
    assert (first.predicted.num_cached_tokens, second.predicted.num_cached_tokens) == (0, 128)
    assert second.predicted.prefill_s < first.predicted.prefill_s
    scene.kill("p")
    assert index.num_blocks(instance_id, hashes) == 0


def test_longest_unused_blocks_are_evicted_from_prompt_end() -> None:
    prefix_index = PrefixIndex()
    prefix_index.note("i", (b"1", b"2", b"3"), 4)
    prefix_index.note("i", (b"1", b"x"), 4)
    assert prefix_index.num_blocks("i", (b"1", b"2", b"3")) == 3
    prefix_index.note("i", (b"y",), 4)
    assert prefix_index.num_blocks("i", (b"1", b"2", b"3")) == 2
    assert prefix_index.num_blocks("i", (b"1", b"x")) == 2
    assert prefix_index.num_blocks("i", (b"2",)) == 1 and prefix_index.num_blocks("i", ()) == 0
    assert prefix_index.num_blocks("another", (b"1",)) == 0


def test_instances_are_known_by_the_beginning_of_their_prompts() -> None:
    index = PrefixIndex()
    for instance_id in ("i", "j", "k", "i"):
        index.note(instance_id, (b"1", instance_id.encode()), 3)
    assert index.last_noted((b"1", b"x"), 2) == ["i", "k"] and index.last_noted((b"1",), 9) == ["i", "k", "j"]
    assert index.last_noted((b"i",), 9) == index.last_noted((), 9) == []
    index.note("k", (b"2", b"3", b"4"), 3)  # evicts the others
    index.forget("j")
    assert index.last_noted((b"1",), 9) == ["i"]


def test_departed_instance_has_no_prefixes() -> None:
    """Its entry would stay for ever: it is forgotten when the instance goes."""
    scene, model = two_hosts(), a_model(routing_block_tokens=64)
    admission = scene.admit(model, "r1", num_prompt_tokens=200, block_hashes=(b"1", b"2"))
    scene.finish_loads()
    placement = scene.placement("r1")
    assert placement is not None
    worker_id = placement.prefill.worker_id
    scene.workers[worker_id] = replace(scene.workers[worker_id], slot=SlotStatus())
    scene.report(worker_id)
    assert scene.policy.state.instances.get(placement.prefill.instance_id) is None
    scene.apply(FirstToken(admission.key))  # was on its way
    assert scene.policy.state.prefix_index.num_blocks(placement.prefill.instance_id, (b"1",)) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 8)), max_size=30))
def test_number_of_blocks_equals_linear_scan(notes: list[tuple[list[int], int]]) -> None:
    """Hashes are chained: each names its block and all before it."""
    prefix_index = PrefixIndex()
    for blocks, max_blocks in notes:
        hashes = tuple(bytes(blocks[: end + 1]) for end in range(len(blocks)))
        prefix_index.note("i", hashes, max_blocks)
        for other, _ in notes:
            chained = [bytes(other[: end + 1]) for end in range(len(other))]
            alone = [prefix_index.num_blocks("i", (block,)) for block in chained]
            assert prefix_index.num_blocks("i", chained) == [*alone, 0].index(0)

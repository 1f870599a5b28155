"""What another instance passed on: handed over, cached, refused, ended and set back where it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.engine.running import (
    Model,
    assert_idle,
    group_of,
    half_loaded,
    hand_over,
    outputs,
    pass_on,
    prompt_of,
    run,
    take,
)
from tests.unit.engine.test_interruptions import Between
from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.engine.core import KvPoolFull
from torchrelay.engine.handover import KvBlock, KvSequence

ModelOf = Callable[..., Model]
BOUNDARIES = (0, 1, 2, 3)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_kv_goes_to_the_decode_worker_from_both(model_of: ModelOf, boundary: int) -> None:
    """Each hands over the layers it computed; between them the hidden states are enough."""
    model = model_of("gemma2")
    source, target = half_loaded(model, boundary, token_budget=23), model.instance(token_budget=19)
    decoder = model.instance()
    group = group_of(prompt_of(70))
    blocks: dict[int, bytes] = {}

    def collect(block: KvBlock) -> None:
        assert block.index not in blocks
        blocks[block.index] = bytes(block.data)

    for _ in range(2):  # the second time the taker finds the prefix in its cache, if it may
        blocks.clear()
        layout = source.kv_layout(group)
        source.prefill(group, collect, until=3)
        run(source)
        assert {layout.locate(index).layer for index in blocks} == set(range(boundary))
        passed = pass_on(source)
        assert passed.layout.num_planes == (1 if boundary else 0)
        take(target, passed, collect)
        [first] = [token for step in run(target) for token in step.tokens]
        assert sorted(blocks) == list(range(layout.num_kv_chunks))
        assert first.num_cached == 0 or boundary == 0  # what lacks layers is never in the cache
        adoption = decoder.adopt(replace(group, prompt=()), layout)
        for index, data in blocks.items():
            adoption.write(index, data)
        adoption.start({0: first.token_id})
        assert [first.token_id, *outputs(run(decoder))["r/0", 0]] == model.expected(group.prompt)
    for instance in (source, target, decoder):
        assert_idle(instance)


def test_a_taken_prompt_is_handed_over_whole_with_what_was_cached(model_of: ModelOf) -> None:
    model = model_of()
    source, target, decoder = half_loaded(model, 2), model.instance(token_budget=16), model.instance()
    prompt = prompt_of(70)
    target.prefill(group_of(prompt, "warm/0"))
    run(target)
    blocks: dict[int, bytes] = {}

    def collect(block: KvBlock) -> None:
        blocks[block.index] = bytes(block.data)

    group = group_of(prompt)
    source.prefill(group, collect, until=3)
    run(source)
    take(target, pass_on(source), collect)
    steps = run(target)
    assert sum(step.num_positions_prefilled for step in steps) == 70 - 64
    assert len(blocks) == source.kv_layout(group).num_kv_chunks
    adoption = decoder.adopt(replace(group, prompt=()), source.kv_layout(group))
    for index, data in blocks.items():
        adoption.write(index, data)
    first = steps[-1].tokens[0].token_id
    adoption.start({0: first})
    assert [first, *outputs(run(decoder))["r/0", 0]] == model.expected(prompt)


@pytest.mark.parametrize("hands_over", [False, True])
def test_a_taken_prompt_that_is_set_back_is_computed_anew(model_of: ModelOf, hands_over: bool) -> None:
    """From its tokens, by the taker alone; no block is handed over twice."""
    model = model_of("qwen3")
    prompt = prompt_of(70)
    for num_steps in range(5):
        blocks: list[int] = []

        def collect(block: KvBlock, blocks: list[int] = blocks) -> None:
            blocks.append(block.index)

        source, target = half_loaded(model, 2), model.instance(token_budget=19, kv_block_tokens=16)
        on_kv = collect if hands_over else None
        source.prefill(group_of(prompt), on_kv, until=3)
        run(source)
        blocks.clear()
        take(target, pass_on(source), on_kv)
        steps = [target.step() for _ in range(num_steps)]
        target.preempt("r/0")
        steps += run(target)
        expected = model.expected(prompt)
        assert outputs(steps)["r/0", 0] == (expected[:1] if hands_over else expected)
        layout = target.kv_layout(group_of(prompt))
        upper = [index for index in range(layout.num_kv_chunks) if layout.locate(index).layer == 2]
        assert sorted(blocks) == (upper if hands_over else [])
        assert_idle(target)


def test_what_does_not_fit_is_refused(model_of: ModelOf) -> None:
    model = model_of()
    source, target = half_loaded(model, 1), model.instance()
    group = group_of(prompt_of(20))
    source.prefill(group, until=3)
    run(source)
    passed = pass_on(source)
    for wrong in (
        replace(passed.layout, boundary=4),
        replace(passed.layout, boundary=2, shape=replace(passed.layout.shape, head_dim=8)),
        replace(passed.layout, block_tokens=0),
        replace(passed.layout, with_kv=False),
        replace(passed.layout, sequences=(KvSequence((0,), 19),)),
    ):
        with pytest.raises(InvalidRequest):
            target.take(group, wrong)
    with pytest.raises(InvalidRequest):
        target.take(group, passed.layout, until=0)
    with pytest.raises(InvalidRequest):
        target.prefill(group, until=4)
    taking = target.take(group, passed.layout)
    with pytest.raises(DataCorrupted):
        taking.write(0, bytes(3))
    with pytest.raises(Conflict, match="2 chunks of r/0 are missing"):
        taking.start()
    taking.drop()
    assert_idle(target)


def test_every_way_out_of_a_taking_frees_the_pages(model_of: ModelOf) -> None:
    model = model_of()
    shape = model.instance().kv_shape
    source, target = half_loaded(model, 1), model.instance(pool_bytes=4 * 16 * shape.bytes_per_token)
    source.prefill(group_of(prompt_of(20)), until=3)
    run(source)
    passed = pass_on(source)
    taking = target.take(passed.spec, passed.layout)
    with pytest.raises(KvPoolFull):
        target.take(replace(passed.spec, group_id="s/0"), passed.layout)
    assert not target.has_work()
    target.cancel("r/0")
    assert_idle(target)
    taking.write(0, passed.chunks[0])  # a chunk that was under way
    taking.start()
    taking.drop()
    assert_idle(target)
    take(target, passed)
    target.step()
    target.cancel("r/0")
    assert_idle(target)


def test_a_taken_prompt_is_cached_with_all_its_layers(model_of: ModelOf) -> None:
    model = model_of()
    source, target = half_loaded(model, 2), model.instance()
    source.prefill(group_of(prompt_of(70)), until=3)
    run(source)
    take(target, pass_on(source))
    run(target)
    last, steps = hand_over(target, model.instance(), group_of(prompt_of(70)))
    assert last.tokens[0].num_cached == 64
    assert [last.tokens[0].token_id, *outputs(steps)["r/0", 0]] == model.expected(prompt_of(70))


@pytest.mark.parametrize("others", [(), ("stays/0",)])
@pytest.mark.parametrize("hands_over", [False, True])
def test_a_taken_prompt_can_end_while_another_batch_of_the_step_is_computed(
    model_of: ModelOf, hands_over: bool, others: tuple[str, ...]
) -> None:
    """A step has a batch for each boundary; what ends during the first is not in the second any more."""
    model = model_of()
    source, target = half_loaded(model, 1), model.instance()
    on_kv = (lambda block: None) if hands_over else None
    for name in ("ends/0", *others):
        source.prefill(group_of(prompt_of(40), name), on_kv, until=3)
    run(source)
    for name in ("ends/0", *others):
        take(target, pass_on(source, name), on_kv)
    target.prefill(group_of(prompt_of(17), "whole/0"))
    Between(target, 0, lambda: target.cancel_soon("ends/0"))
    found = outputs(run(target))
    assert found.pop(("whole/0", 0)) == model.expected(prompt_of(17))
    expected = model.expected(prompt_of(40))
    assert found == {(name, 0): expected[:1] if hands_over else expected for name in others}
    assert_idle(target)

"""Prompts that change hands at a layer boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.running import GREEDY, Model, assert_idle, group_of, hand_over, outputs, prompt_of, run
from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.engine.core import EMPTY_STEP, KvPoolFull, SamplingParams
from torchrelay.engine.handover import KvBlock, KvSequence, KvShape
from torchrelay.engine.instance import Instance
from torchrelay.engine.passing import Passed, PassedLayout
from torchrelay.transfer.buffers import MemoryBuffer

ModelOf = Callable[..., Model]
LENGTHS = (1, 16, 70)
BOUNDARIES = (0, 1, 2, 3)
FEW = replace(GREEDY, max_tokens=6)


def half_loaded(model: Model, num_layers: int, **settings: Any) -> Instance:
    """An instance that has its embeddings and its first layers."""
    instance = model.instance(loaded=False, **settings)
    for segment in range(num_layers + 1):
        instance.segment_ready(segment)
    return instance


def pass_on(source: Instance, group_id: str = "r/0") -> Passed:
    """Everything as bytes that travelled in a buffer of the data plane."""
    passed = source.pass_on(group_id)
    layout = passed.layout
    buffer = MemoryBuffer(group_id, layout.chunk_sizes)
    for index, data in enumerate(passed.chunks):
        buffer.publish(index, data)
    return replace(passed, chunks=tuple(buffer.chunk(index) for index in range(layout.num_chunks)))


def take(
    target: Instance,
    passed: Passed,
    on_kv: Callable[[KvBlock], None] | None = None,
    until: int | None = None,
    order: int = 1,
) -> None:
    taking = target.take(passed.group, passed.layout, on_kv, until)
    for index in list(range(passed.layout.num_chunks))[::order]:
        taking.write(index, bytes(passed.chunks[index]))
    assert taking.num_missing == 0
    taking.start()


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_at_every_boundary_of_every_family(model_of: ModelOf, family: str, boundary: int) -> None:
    """From an instance that has no more layers than those, in layers of several chunks, blocks and pages that differ.

    The same prompts again: the taker has cached their beginnings by then.
    """
    model = model_of(family)
    source = half_loaded(model, boundary, token_budget=23, page_tokens=8, kv_block_tokens=20)
    target = model.instance(token_budget=19, page_tokens=16)
    for num_cached in (0, 64):
        for length in LENGTHS:
            group = replace(group_of(prompt_of(length), sampling=FEW), salt=f"{length}")
            source.prefill(group, until=source.config.num_layers)
            assert outputs(run(source)) == {}
            passed = pass_on(source)
            assert passed.layout.boundary == boundary
            take(target, passed, order=1 if num_cached else -1)
            steps = run(target)
            assert outputs(steps) == {("r/0", 0): model.expected(group.prompt)[: FEW.max_tokens]}
        assert next(token for step in steps for token in step.tokens).num_cached == num_cached
    assert_idle(source)
    assert_idle(target)


@pytest.mark.parametrize("boundary", (1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_to_the_end(model_of: ModelOf, family: str, boundary: int) -> None:
    """Several prompts, beside those that run in chunks; the layers come one by one."""
    model = model_of(family)
    instance = half_loaded(model, boundary, token_budget=23)
    num_layers = instance.config.num_layers
    for length in LENGTHS:
        instance.prefill(group_of(prompt_of(length), f"{length}/0", FEW), until=num_layers)
    assert outputs(run(instance)) == {}
    assert instance.step() is EMPTY_STEP
    for segment in range(boundary + 1, num_layers + 2):
        instance.segment_ready(segment)
    instance.prefill(group_of(prompt_of(15), "chunked/0", FEW))
    steps = run(instance)
    expected = {(f"{length}/0", 0): model.expected(prompt_of(length))[:6] for length in LENGTHS}
    assert outputs(steps) == expected | {("chunked/0", 0): model.expected(prompt_of(15))[:6]}
    assert {name for step in steps for name in step.prefilled} == {name for name, _ in outputs(steps)}
    assert sum(step.num_positions_prefilled for step in steps) == sum(LENGTHS) + 15
    assert_idle(instance)


def test_a_pipeline_of_an_instance_per_layer(model_of: ModelOf) -> None:
    model = model_of("gemma3")
    stages = [model.instance(kv_block_tokens=16) for _ in range(3)]
    group = group_of(prompt_of(70))
    stages[0].prefill(group, until=1)
    for number in (0, 1):
        assert outputs(run(stages[number])) == {}
        assert not stages[number].has_work()  # it stops where it was told to, though it has all layers
        take(stages[number + 1], pass_on(stages[number]), until=(2, None)[number])
    assert outputs(run(stages[2])) == {("r/0", 0): model.expected(group.prompt)}
    for stage in stages:
        assert_idle(stage)


def test_contexts_and_choices_move_together(model_of: ModelOf) -> None:
    model = model_of("qwen3")
    expected = model.expected(prompt_of(21))
    for boundary in BOUNDARIES:
        source, target = half_loaded(model, boundary), model.instance(token_budget=16)
        source.prefill(group_of(prompt_of(21), forced=[(), expected[:5], (), ()]), until=3)
        run(source)
        source.cancel("r/0", 3)
        passed = pass_on(source)
        take(target, passed)
        found = outputs(run(target))
        assert found == {("r/0", 0): expected, ("r/0", 1): expected[5:], ("r/0", 2): expected}
        assert_idle(source)
        assert_idle(target)


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


def test_the_earliest_prompt_that_can_go_on_does(model_of: ModelOf) -> None:
    """ZigZag: the head batch waits for its next layer, the ones behind catch up; then it has the turn again."""
    model = model_of()
    instance = half_loaded(model, 1, token_budget=16)
    for name in "ab":
        instance.prefill(group_of(prompt_of(16), f"{name}/0"), until=3)

    def boundaries() -> list[int]:
        return [group.layer for group in instance._scheduler.by_layer]

    seen = []
    for segment in (2, 3, 4):
        while instance.has_work():
            instance.step()
            seen.append(boundaries())
        instance.segment_ready(segment)
    assert seen == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]
    assert set(outputs(run(instance))) == {("a/0", 0), ("b/0", 0)}


def test_small_prompts_at_one_boundary_share_a_batch(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=32)
    for number in range(3):
        instance.prefill(group_of(prompt_of(16), f"{number}/0"), until=2)
    steps = [instance.step() for _ in range(4)]
    assert not instance.has_work() and all(step is not EMPTY_STEP for step in steps)
    assert [group.layer for group in instance._scheduler.by_layer] == [2, 2, 2]


def test_only_what_is_at_one_boundary_can_be_passed_on(model_of: ModelOf) -> None:
    model = model_of()
    instance = model.instance(token_budget=16)
    with pytest.raises(Conflict):
        instance.pass_on("r/0")
    instance.prefill(group_of(prompt_of(40)))
    instance.step()
    with pytest.raises(Conflict):  # its first chunk is through all layers
        instance.pass_on("r/0")
    instance.cancel("r/0")
    instance.prefill(group_of(prompt_of(40)))
    passed = pass_on(instance)  # it only waited
    assert (passed.layout.boundary, passed.chunks) == (0, ())
    take(instance, passed)
    assert outputs(run(instance))["r/0", 0] == model.expected(prompt_of(40))
    assert_idle(instance)


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
    taking = target.take(passed.group, passed.layout)
    with pytest.raises(KvPoolFull):
        target.take(replace(passed.group, group_id="s/0"), passed.layout)
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


def test_a_prompt_by_layers_can_be_cancelled_or_set_back_at_any_boundary(model_of: ModelOf) -> None:
    model = model_of("qwen2")
    expected = model.expected(prompt_of(40))
    for num_steps in range(5):
        for way in ("cancel", "set back"):
            instance = model.instance(token_budget=16)
            instance.prefill(group_of(prompt_of(40)), until=3)
            steps = [instance.step() for _ in range(num_steps)]
            if way == "cancel":
                instance.cancel("r/0")
            else:
                instance.preempt("r/0")
            instance.check_integrity()
            steps += run(instance)
            assert way == "cancel" or outputs(steps)["r/0", 0] == expected
            assert_idle(instance)


def test_sampled_tokens_do_not_depend_on_who_computed(model_of: ModelOf) -> None:
    model = model_of()
    sampling = SamplingParams(temperature=1.3, seed=5, max_tokens=12, frequency_penalty=0.5, top_logprobs=2)
    group = group_of(prompt_of(33), sampling=sampling, forced=[(), (7, 9)])
    alone = model.instance()
    alone.prefill(group)
    source, target = half_loaded(model, 2), model.instance()
    source.prefill(group, until=3)
    run(source)
    take(target, pass_on(source))
    assert outputs(run(target)) == outputs(run(alone))


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


@st.composite
def layouts(draw: st.DrawFn) -> PassedLayout:
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    sequences = tuple(KvSequence((i,), length) for i, length in enumerate(lengths))
    shape = KvShape(draw(st.integers(1, 5)), draw(st.integers(1, 3)), 8, draw(st.sampled_from([2, 4])))
    boundary, with_kv = draw(st.integers(0, shape.num_layers)), draw(st.booleans())
    return PassedLayout(shape, draw(st.integers(1, 9)) * 4, boundary, with_kv, draw(st.integers(1, 40)), sequences)


@given(layouts())
def test_chunks_hold_each_position_once_in_each_plane(layout: PassedLayout) -> None:
    seen, num_hidden = [], 0
    for index in range(layout.num_chunks):
        place = layout.locate(index)
        tokens = range(place.token_begin, place.token_end)
        is_hidden = layout.holds_hidden(place)
        row_bytes = layout.hidden_bytes if is_hidden else layout.shape.bytes_per_token_layer
        assert layout.chunk_bytes(index) == len(tokens) * row_bytes
        num_hidden += len(tokens) if is_hidden else 0
        seen += [(place.sequence, place.layer, token) for token in tokens]
    num_tokens = sum(each.num_context_tokens for each in layout.sequences)
    assert len(seen) == len(set(seen)) == num_tokens * layout.num_planes
    assert num_hidden == (num_tokens if layout.boundary else 0)
    assert len(layout.chunk_sizes) == layout.num_chunks
    with pytest.raises(IndexError):
        layout.locate(layout.num_chunks)

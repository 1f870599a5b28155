"""Prompts move at every layer boundary, and their output stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.harness import (
    GREEDY,
    ModelOf,
    assert_idle,
    export_prefill,
    group_of,
    half_loaded,
    import_prefill,
    outputs,
    prompt_of,
    run,
)
from torchrelay.common.errors import Conflict
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kv.layout import KvSequence, KvShape
from torchrelay.engine.kv.prefill_layout import PrefillLayout, context_digests

LENGTHS = (1, 16, 70)
BOUNDARIES = (0, 1, 2, 3)
FEW = replace(GREEDY, max_tokens=6)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_moves_at_every_boundary(model_of: ModelOf, family: str, boundary: int) -> None:
    """The exporter has only the layers below the boundary, and both sides differ in budgets, blocks and pages.

    The second round repeats the prompts, whose prefixes the importer has cached by then.
    """
    model = model_of(family)
    source = half_loaded(model, boundary, token_budget=23, page_tokens=8, kv_block_tokens=20)
    target = model.instance(token_budget=19, page_tokens=16)
    for num_cached in (0, 64):
        for length in LENGTHS:
            group = replace(group_of(prompt_of(length), sampling=FEW), tenant_id=f"{length}")
            source.prefill(group)
            assert outputs(run(source)) == {}
            exported = export_prefill(source)
            assert exported.layout.boundary == boundary
            import_prefill(target, exported, order=1 if num_cached else -1)
            steps = run(target)
            assert outputs(steps) == {("r/0", 0): model.expected(group.prompt)[: FEW.max_tokens]}
        assert next(token for step in steps for token in step.tokens).num_cached == num_cached
    assert_idle(source)
    assert_idle(target)


def test_prompt_passes_through_instance_per_layer(model_of: ModelOf) -> None:
    model = model_of("gemma3")
    stages = [half_loaded(model, num_layers, kv_block_tokens=16) for num_layers in (1, 2)]
    stages.append(model.instance(kv_block_tokens=16))
    group = group_of(prompt_of(70))
    stages[0].prefill(group)
    for number in (0, 1):
        assert outputs(run(stages[number])) == {}
        exported = export_prefill(stages[number])
        assert exported.layout.boundary == number + 1
        import_prefill(stages[number + 1], exported)
    assert outputs(run(stages[2])) == {("r/0", 0): model.expected(group.prompt)}
    for stage in stages:
        assert_idle(stage)


def test_choices_move_with_their_contexts(model_of: ModelOf) -> None:
    model = model_of("qwen3")
    expected = model.expected(prompt_of(21))
    for boundary in BOUNDARIES:
        source, target = half_loaded(model, boundary), model.instance(token_budget=16)
        source.prefill(group_of(prompt_of(21), forced=[(), expected[:5], (), ()]))
        run(source)
        source.cancel("r/0", 3)
        exported = export_prefill(source)
        import_prefill(target, exported)
        actual = outputs(run(target))
        assert actual == {("r/0", 0): expected, ("r/0", 1): expected[5:], ("r/0", 2): expected}
        assert_idle(source)
        assert_idle(target)


def test_moved_prompt_samples_same_tokens(model_of: ModelOf) -> None:
    model = model_of()
    sampling = SamplingParams(temperature=1.3, seed=5, max_tokens=12, frequency_penalty=0.5, top_logprobs=2)
    group = group_of(prompt_of(33), sampling=sampling, forced=[(), (7, 9)])
    alone = model.instance()
    alone.prefill(group)
    source, target = half_loaded(model, 2), model.instance()
    source.prefill(group)
    run(source)
    import_prefill(target, export_prefill(source))
    assert outputs(run(target)) == outputs(run(alone))


def test_export_requires_single_boundary(model_of: ModelOf) -> None:
    model = model_of()
    instance = model.instance(token_budget=16)
    with pytest.raises(Conflict):
        instance.export_prefill("r/0")
    instance.prefill(group_of(prompt_of(40)))
    instance.step()
    with pytest.raises(Conflict):  # its first chunk is through all layers
        instance.export_prefill("r/0")
    instance.cancel("r/0")
    instance.prefill(group_of(prompt_of(40)))
    exported = export_prefill(instance)  # it only waited
    assert (exported.layout.boundary, exported.chunks) == (0, ())
    import_prefill(instance, exported)
    assert outputs(run(instance))["r/0", 0] == model.expected(prompt_of(40))
    assert_idle(instance)


def test_exported_prompt_stays_and_others_run_until_it_is_cancelled(model_of: ModelOf) -> None:
    """Its chunks are read between steps."""
    model = model_of()
    source = half_loaded(model, 2)
    source.prefill(group_of(prompt_of(70)))
    run(source)
    exported = source.export_prefill("r/0")
    early = bytes(exported.read(0))
    source.prefill(group_of(prompt_of(40), "s/0"))
    for segment in range(source.config.num_layers + 2):
        source.segment_ready(segment)
    assert outputs(run(source)) == {("s/0", 0): model.expected(prompt_of(40))}
    source.check_integrity()
    assert exported.read(0) == early
    with pytest.raises(Conflict):
        source.export_prefill("r/0")
    with pytest.raises(Conflict):
        source.preempt("r/0")
    source.cancel("r/0")
    with pytest.raises(Conflict, match="has ended"):
        exported.read(0)
    assert_idle(source)


def test_prompt_moves_without_contexts_that_have_ended(model_of: ModelOf) -> None:
    instance = half_loaded(model_of(), 1)
    for on_kv in (None, lambda block: None):
        instance.prefill(group_of(prompt_of(21), forced=[(), (1, 2), ()]), on_kv)
        run(instance)
        for choice in (0, 2):
            instance.cancel("r/0", choice)
        assert export_prefill(instance).spec.contexts() == (((1,), (1, 2)),)
    assert_idle(instance)


def test_digests_tell_contexts_apart() -> None:
    group = group_of((1, 2, 3), forced=[(), (4,), ()])
    digests = context_digests(group)
    assert len(set(digests)) == 2
    assert digests == context_digests(replace(group, group_id="r/1", tenant_id="other"))
    for other in (group_of((1, 2, 4), forced=[(), (4,)]), group_of((1, 2, 3), forced=[(4,), ()])):
        assert context_digests(other) != digests


@st.composite
def layouts(draw: st.DrawFn) -> PrefillLayout:
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    sequences = tuple(KvSequence((i,), length) for i, length in enumerate(lengths))
    shape = KvShape(draw(st.integers(1, 5)), draw(st.integers(1, 3)), 8, draw(st.sampled_from([2, 4])))
    boundary = draw(st.integers(0, shape.num_layers))
    return PrefillLayout(shape, draw(st.integers(1, 9)) * 4, boundary, draw(st.integers(1, 40)), sequences)


@given(layouts())
def test_chunks_cover_each_plane_once(layout: PrefillLayout) -> None:
    seen, num_hidden = [], 0
    for index in range(layout.num_chunks):
        place = layout.locate(index)
        tokens = range(place.token_begin, place.token_end)
        is_hidden = layout.holds_hidden(place)
        row_bytes = layout.hidden_bytes if is_hidden else layout.shape.bytes_per_token_layer
        assert layout.chunk_bytes(index) == len(tokens) * row_bytes
        num_hidden += len(tokens) if is_hidden else 0
        seen += [(place.sequence, place.layer, token) for token in tokens]
    for max_bytes in (1, 1 << 10, 1 << 30):
        pieces = list(layout.pieces(max_bytes))
        assert [index for piece in pieces for index in piece] == list(range(layout.num_chunks))
        layers = list(layout.layer_ranges(max_bytes))
        assert [layer for each in layers for layer in each] == list(range(layout.boundary))
        layer_bytes = layout.shape.bytes_per_token_layer * sum(each.num_context_tokens for each in layout.sequences)
        assert all(len(each) == 1 or len(each) * layer_bytes <= max_bytes for each in layers)
        assert all(len(piece) == 1 or sum(map(layout.chunk_bytes, piece)) <= max_bytes for piece in pieces)
    num_tokens = sum(each.num_context_tokens for each in layout.sequences)
    assert len(seen) == len(set(seen)) == num_tokens * layout.num_planes
    assert num_hidden == (num_tokens if layout.boundary else 0)
    assert len(layout.chunk_sizes) == layout.num_chunks
    with pytest.raises(IndexError):
        layout.locate(layout.num_chunks)

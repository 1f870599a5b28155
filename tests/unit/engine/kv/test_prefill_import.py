"""Prompts that another instance exported: handed over, cached, refused, ended and preempted where they continue."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tests.unit.engine.batching.test_interruptions import Between
from tests.unit.engine.harness import (
    ModelOf,
    assert_idle,
    begin_import,
    copy_into,
    export_prefill,
    group_of,
    half_loaded,
    hand_over,
    import_prefill,
    outputs,
    prompt_of,
    run,
)
from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.engine.batching.sequences import GroupState
from torchrelay.engine.core import KvBlock
from torchrelay.engine.kv.prefill_import import PrefillImport

BOUNDARIES = (0, 1, 2, 3)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_importer_hands_over_all_layers(model_of: ModelOf, boundary: int) -> None:
    """Those that it imported, too, whatever the exporter has handed over already."""
    model = model_of("gemma2")
    source, target = half_loaded(model, boundary, token_budget=23), model.instance(token_budget=19)
    decoder = model.instance()
    group = group_of(prompt_of(70))
    for _ in range(2):  # the second time the importer finds the prefix in its cache, if enabled
        layout = source.kv_layout(group)
        early: dict[int, bytes] = {}
        source.prefill(group, copy_into(early))
        run(source)
        assert {layout.locate(index).layer for index in early} == set(range(boundary))
        blocks: dict[int, bytes] = {}
        import_prefill(target, export_prefill(source), copy_into(blocks))
        [first] = [token for step in run(target) for token in step.tokens]
        assert sorted(blocks) == list(range(layout.num_kv_chunks))
        assert early.items() <= blocks.items()
        kv_import = decoder.import_kv(replace(group, prompt=()), layout)
        for index, data in blocks.items():
            kv_import.write(index, data)
        kv_import.start({0: first.token_id})
        assert [first.token_id, *outputs(run(decoder))["r/0", 0]] == model.expected(group.prompt)
    for instance in (source, target, decoder):
        assert_idle(instance)


def test_imported_prompt_hands_over_cached_kv(model_of: ModelOf) -> None:
    model = model_of()
    source, target, decoder = half_loaded(model, 2), model.instance(token_budget=16), model.instance()
    prompt = prompt_of(70)
    target.prefill(group_of(prompt, "warm/0"))
    run(target)
    blocks: dict[int, bytes] = {}
    group = group_of(prompt)
    source.prefill(group)
    run(source)
    import_prefill(target, export_prefill(source), copy_into(blocks))
    steps = run(target)
    assert sum(step.num_positions_prefilled for step in steps) == 70 - 64
    assert len(blocks) == source.kv_layout(group).num_kv_chunks
    kv_import = decoder.import_kv(replace(group, prompt=()), source.kv_layout(group))
    for index, data in blocks.items():
        kv_import.write(index, data)
    first = steps[-1].tokens[0].token_id
    kv_import.start({0: first})
    assert [first, *outputs(run(decoder))["r/0", 0]] == model.expected(prompt)


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_prompt_is_imported_between_layers_of_a_step(model_of: ModelOf, number: int) -> None:
    """The step, of chunks and a decoding choice, goes on as it began; the import continues in the next step."""
    model, source = model_of("gemma2"), half_loaded(model_of("gemma2"), 2)
    prompts = {"a/0": prompt_of(40, 1), "b/0": prompt_of(30, 2), "r/0": prompt_of(70)}
    source.prefill(group_of(prompts["r/0"]))
    run(source)
    exported, num_calls = export_prefill(source), count()

    def between_layers() -> None:
        if next(num_calls) == number:
            import_prefill(target, exported)

    target = model.instance(token_budget=19, between_layers=between_layers)
    for group_id in ("a/0", "b/0"):
        target.prefill(group_of(prompts[group_id], group_id))
    tokens = outputs(run(target))
    assert next(num_calls) > number
    assert {name: tokens[name, 0] for name in prompts} == {
        name: model.expected(prompt) for name, prompt in prompts.items()
    }
    assert_idle(target)


@pytest.mark.parametrize("number", range(0, 20, 3))
def test_import_between_layers_takes_no_pages_of_the_step(model_of: ModelOf, number: int) -> None:
    """A tenant without pages preempts others for its import only between steps."""
    model, source = model_of(), half_loaded(model_of(), 2)
    prompts = {"a/0": prompt_of(60, 1), "a/1": prompt_of(60, 2), "r/0": prompt_of(40)}
    source.prefill(replace(group_of(prompts["r/0"]), tenant_id="b"))
    run(source)
    exported, num_calls, imports = export_prefill(source), count(), list[PrefillImport]()

    def import_all() -> None:
        layout = imports[0].receive(exported.layout.boundary, exported.layout.block_tokens)
        for index in range(layout.num_chunks):
            imports[0].write(index, exported.chunks[index])
        imports[0].start()

    has_pages: list[bool] = []

    def between_layers() -> None:
        if next(num_calls) == number:
            imports.append(target.import_prefill(exported.spec, on_pages=lambda: has_pages.append(True)))

    target = model.instance(token_budget=19, num_pages=8, between_layers=between_layers)
    for group_id in ("a/0", "a/1"):
        target.prefill(replace(group_of(prompts[group_id], group_id), tenant_id="a"))
    steps = []
    while target.has_work():
        steps.append(target.step())
        target.check_integrity()
        if has_pages:
            has_pages.clear()
            import_all()
    tokens = outputs(steps)
    assert {name: tokens[name, 0] for name in prompts} == {
        name: model.expected(prompt) for name, prompt in prompts.items()
    }
    assert_idle(target)


@pytest.mark.parametrize("hands_over", [False, True])
def test_preempted_imported_prompt_is_recomputed(model_of: ModelOf, hands_over: bool) -> None:
    """The importer recomputes the prompt from its tokens; no block is handed over twice."""
    model = model_of("qwen3")
    prompt = prompt_of(70)
    for num_steps in range(5):
        blocks: list[int] = []

        def collect(block: KvBlock, blocks: list[int] = blocks) -> None:
            blocks.append(block.index)

        source, target = half_loaded(model, 2), model.instance(token_budget=19, kv_block_tokens=16)
        on_kv = collect if hands_over else None
        source.prefill(group_of(prompt))
        run(source)
        import_prefill(target, export_prefill(source), on_kv)
        steps = [target.step() for _ in range(num_steps)]
        target.preempt("r/0")
        steps += run(target)
        expected = model.expected(prompt)
        assert outputs(steps)["r/0", 0] == (expected[:1] if hands_over else expected)
        layout = target.kv_layout(group_of(prompt))
        assert sorted(blocks) == (list(range(layout.num_kv_chunks)) if hands_over else [])
        assert_idle(target)


def test_mismatched_prefill_import_is_refused(model_of: ModelOf) -> None:
    model = model_of()
    source, target = half_loaded(model, 1), model.instance()
    source.prefill(group_of(prompt_of(20)))
    run(source)
    prefill_import = begin_import(target, export_prefill(source))
    for boundary, block_tokens in ((4, 16), (1, 0)):
        with pytest.raises(InvalidRequest):
            prefill_import.receive(boundary, block_tokens)
    with pytest.raises(DataCorrupted):
        prefill_import.write(0, bytes(3))
    with pytest.raises(Conflict, match="2 chunks of r/0 are missing"):
        prefill_import.start()
    target.cancel("r/0")
    assert_idle(target)


@pytest.mark.parametrize("hands_over", [False, True])
@pytest.mark.parametrize("is_loading", [False, True])
def test_incomplete_import_is_computed_from_its_beginning(
    model_of: ModelOf, is_loading: bool, hands_over: bool
) -> None:
    model = model_of()
    source = half_loaded(model, 2)
    target = half_loaded(model, 1) if is_loading else model.instance()
    source.prefill(group_of(prompt_of(70)))
    run(source)
    exported = export_prefill(source)
    blocks: dict[int, bytes] = {}
    prefill_import = begin_import(target, exported, copy_into(blocks) if hands_over else None)
    for index in range(1, exported.layout.num_chunks):
        prefill_import.write(index, exported.chunks[index])
    prefill_import.start_over()
    steps = run(target)
    for segment in range(target.config.num_layers + 2):
        target.segment_ready(segment)
    steps += run(target)
    expected = model.expected(prompt_of(70))
    assert outputs(steps)["r/0", 0] == (expected[:1] if hands_over else expected)
    assert len(blocks) == (target.kv_layout(exported.spec).num_kv_chunks if hands_over else 0)
    assert_idle(target)


def test_import_waits_for_pages_in_turn(model_of: ModelOf) -> None:
    """Its source keeps the prompt until then, and loses nothing if the import is cancelled while it waits."""
    model = model_of()
    target = model.instance(num_pages=4)
    target.prefill(group_of(prompt_of(20), "runs/0"))
    target.step()
    target.prefill(group_of(prompt_of(20), "earlier/0"))
    has_pages: list[str] = []
    for name in ("cancelled/0", "r/0"):
        target.import_prefill(group_of(prompt_of(20), name), on_pages=lambda name=name: has_pages.append(name))  # type: ignore[misc]
    run_to_end = [target.step() for _ in range(3)]
    assert has_pages == [] and all(not step.prefilled for step in run_to_end)
    target.cancel("cancelled/0")
    steps = run(target)
    assert outputs(steps)["earlier/0", 0] == model.expected(prompt_of(20))
    assert has_pages == ["r/0"] and [group.state for group in target.groups()] == [GroupState.RECEIVING]
    target.check_integrity()
    target.cancel("r/0")
    assert_idle(target)


def test_prefill_import_frees_pages_at_any_end(model_of: ModelOf) -> None:
    model = model_of()
    source, target = half_loaded(model, 1), model.instance(num_pages=4)
    source.prefill(group_of(prompt_of(20)))
    run(source)
    exported = export_prefill(source)
    prefill_import = begin_import(target, exported)
    assert not target.has_work()
    target.cancel("r/0")
    assert_idle(target)
    prefill_import.write(0, exported.chunks[0])  # a chunk that was under way
    prefill_import.start()
    prefill_import.start_over()
    assert_idle(target)
    import_prefill(target, exported)
    target.step()
    target.cancel("r/0")
    assert_idle(target)


def test_imported_prompt_is_cached_with_all_layers(model_of: ModelOf) -> None:
    model = model_of()
    source, target = half_loaded(model, 2), model.instance()
    source.prefill(group_of(prompt_of(70)))
    run(source)
    import_prefill(target, export_prefill(source))
    run(target)
    last, steps = hand_over(target, model.instance(), group_of(prompt_of(70)))
    assert last.tokens[0].num_cached == 64
    assert [last.tokens[0].token_id, *outputs(steps)["r/0", 0]] == model.expected(prompt_of(70))


@pytest.mark.parametrize("others", [(), ("stays/0",)])
@pytest.mark.parametrize("hands_over", [False, True])
def test_imported_prompt_ends_during_other_batch_of_step(
    model_of: ModelOf, hands_over: bool, others: tuple[str, ...]
) -> None:
    """A step has a batch for each boundary; a group that ends during the first is not in the second."""
    model = model_of()
    source, target = half_loaded(model, 1), model.instance()
    on_kv = (lambda block: None) if hands_over else None
    for name in ("ends/0", *others):
        source.prefill(group_of(prompt_of(40), name), on_kv)
    run(source)
    for name in ("ends/0", *others):
        import_prefill(target, export_prefill(source, name), on_kv)
    target.prefill(group_of(prompt_of(17), "whole/0"))
    Between(target, 0, lambda: target.cancel_soon("ends/0"))
    actual = outputs(run(target))
    assert actual.pop(("whole/0", 0)) == model.expected(prompt_of(17))
    expected = model.expected(prompt_of(40))
    assert actual == {(name, 0): expected[:1] if hands_over else expected for name in others}
    assert_idle(target)

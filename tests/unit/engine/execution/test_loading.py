"""Layers run as their segments arrive, and never before; prompts that wait for weights end like any others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.harness import (
    GREEDY,
    Clock,
    Model,
    ModelOf,
    answer,
    assert_idle,
    export_prefill,
    group_of,
    half_loaded,
    import_prefill,
    load_rest,
    outputs,
    prompt_of,
    run,
)
from torchrelay.engine.core import EMPTY_STEP, GroupSpec, LoadFailed
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.model.batch import Batch
from torchrelay.engine.weights.segment_gate import SegmentGate

LENGTHS = (1, 16, 70)
FEW = replace(GREEDY, max_tokens=6)


def boundaries(instance: Instance) -> list[int]:
    return [group.layer for group in instance.groups()]


@pytest.mark.parametrize("boundary", (1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_output_is_exact(model_of: ModelOf, family: str, boundary: int) -> None:
    """The layers arrive one by one; once all are here, the prompts continue in chunks beside a new prompt."""
    model = model_of(family)
    instance = half_loaded(model, boundary, token_budget=23)
    for length in LENGTHS:
        instance.prefill(group_of(prompt_of(length), f"{length}/0", FEW))
    assert outputs(run(instance)) == {}
    assert instance.step() is EMPTY_STEP
    assert boundaries(instance) == [boundary] * 3
    load_rest(instance)
    instance.prefill(group_of(prompt_of(15), "new/0", FEW))
    steps = run(instance)
    expected = {(f"{length}/0", 0): model.expected(prompt_of(length))[:6] for length in LENGTHS}
    assert outputs(steps) == expected | {("new/0", 0): model.expected(prompt_of(15))[:6]}
    assert {name for step in steps for name in step.prefilled} == {name for name, _ in outputs(steps)}
    assert sum(step.num_positions_prefilled for step in steps) == sum(LENGTHS) + 15
    assert_idle(instance)


def test_progress_counts_positions_through_all_layers(model_of: ModelOf) -> None:
    """A cancelled prompt is billed by it, so a prompt that ends during a load is billed like an unfinished step."""
    instance = half_loaded(model_of(), 2, token_budget=16)
    instance.prefill(group_of(prompt_of(40)))
    early = run(instance)
    assert [step.ran_one_layer for step in early] == [True, True]
    assert all(step.prompts == () and step.num_positions_prefilled == 0 for step in early)
    load_rest(instance)
    assert [each.num_computed for step in run(instance) for each in step.prompts] == [16, 32]


def test_earliest_runnable_prompt_runs(model_of: ModelOf) -> None:
    """ZigZag: while the first batch waits for its next layer, later batches catch up; then it runs again."""
    instance = half_loaded(model_of(), 1, token_budget=16)
    for name in "ab":
        instance.prefill(group_of(prompt_of(16), f"{name}/0"))
    seen = []
    for segment in (2, 3, 4):
        while instance.has_work():
            instance.step()
            seen.append(boundaries(instance))
        instance.segment_ready(segment)
    assert seen == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]
    assert set(outputs(run(instance))) == {("a/0", 0), ("b/0", 0)}


def test_small_prompts_at_same_boundary_share_batch(model_of: ModelOf) -> None:
    instance = half_loaded(model_of(), 2, token_budget=32)
    for number in range(3):
        instance.prefill(group_of(prompt_of(16), f"{number}/0"))
    seen = []
    while instance.has_work():
        instance.step()
        seen.append(boundaries(instance))
    assert seen == [[1, 1, 0], [2, 2, 0], [2, 2, 1], [2, 2, 2]]


def test_hidden_states_of_waiting_prompts_are_bounded(model_of: ModelOf) -> None:
    """A sixteenth of the pool holds those of 64 positions here; prompts beyond it run once all weights are here."""
    model = model_of()
    whole = model.instance()
    hidden_bytes = whole.config.hidden_size * whole.model.weights.dtype.itemsize
    instance = half_loaded(model, 2, pool_bytes=16 * 64 * hidden_bytes)
    for length, name in ((40, "a/0"), (30, "too much/0"), (20, "b/0")):
        instance.prefill(group_of(prompt_of(length), name, FEW))
    run(instance)
    assert boundaries(instance) == [2, 0, 2]
    instance.cancel("a/0")
    run(instance)
    assert boundaries(instance) == [2, 2]
    load_rest(instance)
    expected = {("too much/0", 0): model.expected(prompt_of(30))[:6], ("b/0", 0): model.expected(prompt_of(20))[:6]}
    assert outputs(run(instance)) == expected
    assert_idle(instance)


def test_choices_wait_for_all_layers(model_of: ModelOf) -> None:
    """KV from another worker arrives before the weights: its choices decode afterwards, and block no prompt."""
    model = model_of()
    whole, instance = model.instance(), half_loaded(model, 1)
    group, blocks = group_of(prompt_of(20), "moved/0", FEW), {}
    whole.prefill(group, lambda block: blocks.update({block.index: bytes(block.data)}))
    [first] = [token for step in run(whole) for token in step.tokens]
    kv_import = instance.import_kv(replace(group, prompt=()), whole.kv_layout(group))
    for index, data in blocks.items():
        kv_import.write(index, data)
    kv_import.start({0: first.token_id})
    assert not instance.has_work()
    instance.prefill(group_of(prompt_of(16), sampling=FEW))
    assert outputs(run(instance)) == {}
    load_rest(instance)
    actual = outputs(run(instance))
    assert [first.token_id, *actual["moved/0", 0]] == model.expected(prompt_of(20))[:6]
    assert actual["r/0", 0] == model.expected(prompt_of(16))[:6]
    assert_idle(instance)


def test_prompt_that_lacks_the_head_alone_is_not_delayed(model_of: ModelOf) -> None:
    """A long prompt that could not begin was admitted before it."""
    model = model_of()
    whole = model.instance()
    hidden_bytes = whole.config.hidden_size * whole.model.weights.dtype.itemsize
    instance = half_loaded(model, 3, pool_bytes=16 * 64 * hidden_bytes, token_budget=16)
    for length, name in ((90, "long/0"), (40, "short/0")):
        instance.prefill(group_of(prompt_of(length), name, FEW))
    run(instance)
    assert boundaries(instance) == [0, 3]
    instance.segment_ready(4)
    first = instance.step()
    assert [(token.group_id, token.token_id) for token in first.tokens] == [
        ("short/0", model.expected(prompt_of(40))[0])
    ]
    assert first.num_positions_prefilled == 40, "its token does not wait for a chunk of the long prompt"
    actual = outputs([first, *run(instance)])
    assert actual == {
        ("long/0", 0): model.expected(prompt_of(90))[:6],
        ("short/0", 0): model.expected(prompt_of(40))[:6],
    }
    assert_idle(instance)


PROMPT = prompt_of(40)
SOON_S = 0.05


class Watched:
    """An instance over a pack of 0xFF bytes (NaN in any dtype), with the layers that have run."""

    def __init__(self, model: Model) -> None:
        self.pack = model.pack
        self.data = bytearray(b"\xff" * len(self.pack.data))
        self.instance = Instance(self.pack.manifest, memoryview(self.data).toreadonly(), KvPool(1 << 20))
        self.num_layers = self.instance.config.num_layers
        self.ran: list[int] = []
        inner = self.instance.model.transformer.run_layer

        def run_layer(layer: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
            self.ran.append(layer)
            return inner(layer, hidden, batch)

        self.instance.model.transformer.run_layer = run_layer  # type: ignore[method-assign]

    def deliver(self, segment: int) -> None:
        """Delivers the bytes of a segment."""
        span = self.pack.manifest.segments[segment]
        self.data[span.begin : span.end] = self.pack.data[span.begin : span.end]
        self.instance.segment_ready(segment)


@pytest.mark.parametrize("tied", [False, True])
def test_layer_runs_once_its_segment_arrives(model_of: ModelOf, tied: bool) -> None:
    model = model_of("qwen2", tied)
    watched = Watched(model)
    instance = watched.instance
    instance.prefill(group_of(PROMPT))
    for segment in range(watched.num_layers + 1):
        assert outputs(run(instance)) == {}
        assert watched.ran == list(range(max(0, segment - 1)))
        watched.deliver(segment)
        assert instance.num_segments_ready == segment + 1
    assert outputs(run(instance)) == {}
    watched.deliver(watched.num_layers + 1)
    steps = run(instance)
    assert outputs(steps)["r/0", 0] == model.expected(PROMPT)
    assert steps[0].tokens  # all layers have run before
    assert_idle(instance)


def test_loaded_instance_survives_failed_store(model_of: ModelOf) -> None:
    model = model_of()
    instance = model.instance()
    instance.fail("the store went away")
    assert answer(instance, PROMPT) == model.expected(PROMPT)


def ending(group: GroupSpec, why: str) -> GroupSpec:
    return replace(group, deadline_s=Clock.now_s + SOON_S) if why == "deadline" else group


@pytest.mark.parametrize("why", ["cancel", "deadline"])
@pytest.mark.parametrize("num_layers", [-1, 0, 2, 3])
def test_group_that_waits_for_weights_ends(model_of: ModelOf, num_layers: int, why: str) -> None:
    """The groups wait for the embeddings, a layer, or the head."""
    model, clock = model_of("gemma3"), Clock()
    instance = half_loaded(model, num_layers, clock=clock)
    instance.prefill(group_of(prompt_of(17), "before/0"))
    instance.prefill(ending(group_of(PROMPT, "ends/0"), why))
    instance.prefill(group_of(prompt_of(20), "after/0", forced=[(), (5,)]))
    assert outputs(run(instance)) == {}
    num_free = instance.num_free_pages
    clock.now_s += SOON_S
    if why == "cancel":
        instance.cancel_soon("ends/0")
        instance.cancel_soon("after/0", 1)
        instance.cancel_soon("unknown/0")
    step = instance.step()
    assert instance.num_free_pages >= num_free + 4  # pages of 16 tokens for a prompt of 40 and 23 more
    assert step.expired == (("ends/0",) if why == "deadline" else ())
    load_rest(instance)
    actual = outputs(run(instance))
    assert (("after/0", 1) in actual) == (why == "deadline")
    actual.pop(("after/0", 1), None)
    assert actual == {
        ("before/0", 0): model.expected(prompt_of(17)),
        ("after/0", 0): model.expected(prompt_of(20)),
    }
    assert_idle(instance)


def test_imported_prompt_needs_no_embeddings_but_for_a_tied_head(model_of: ModelOf) -> None:
    model = model_of(tied=True)
    source, target = half_loaded(model, 1), model.instance(loaded=False)
    assert target.config.tied_embeddings
    for segment in range(1, target.config.num_layers + 2):
        target.segment_ready(segment)
    source.prefill(group_of(PROMPT))
    run(source)
    import_prefill(target, export_prefill(source))
    assert outputs(run(target)) == {}
    assert [group.layer for group in target.groups()] == [target.config.num_layers]
    target.segment_ready(0)
    assert outputs(run(target))["r/0", 0] == model.expected(PROMPT)
    assert_idle(target)


def test_group_waiting_for_pages_expires_during_load(model_of: ModelOf) -> None:
    model, clock = model_of(), Clock()
    instance = half_loaded(model, 1, num_pages=5, clock=clock)
    instance.prefill(group_of(PROMPT))
    instance.prefill(ending(group_of(PROMPT, "late/0"), "deadline"))
    run(instance)
    clock.now_s += SOON_S
    assert instance.max_sleep_s() == 0
    assert instance.step().expired == ("late/0",)
    load_rest(instance)
    assert outputs(run(instance)).keys() == {("r/0", 0)}


def test_prompt_fails_with_its_load(model_of: ModelOf) -> None:
    """The prompt waits without a step; without work after the failure it would wait forever."""
    instance = half_loaded(model_of(), 1)
    instance.prefill(group_of(PROMPT))
    run(instance)
    instance.fail("no holder is left")
    assert instance.has_work()
    with pytest.raises(LoadFailed, match=r"segment 2 .* no holder is left"):
        instance.step()
    instance.check_integrity()
    instance.cancel("r/0")
    assert_idle(instance)


def test_gate_notifies_every_change_and_names_the_reason_of_a_closed_segment() -> None:
    gate, changes = SegmentGate(2), []
    gate.on_change = lambda: changes.append((gate.num_open, gate.all_settled))
    gate.open(0)
    gate.open(0)
    assert [gate.is_open(segment) for segment in range(2)] == [True, False]
    gate.require(0)
    with pytest.raises(LoadFailed, match=r"segment 1 .* still to come"):
        gate.require(1)
    gate.fail("no holder is left")
    assert changes == [(1, False), (1, True)]
    gate.require(0)
    with pytest.raises(LoadFailed, match=r"segment 1 .* no holder is left"):
        gate.require(1)

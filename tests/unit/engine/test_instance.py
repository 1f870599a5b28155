from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.harness import GREEDY, ModelOf, answer, assert_idle, group_of, load_rest, outputs, prompt_of, run
from torchrelay.common.errors import Conflict, ContextLengthExceeded, DataCorrupted, InvalidRequest
from torchrelay.engine.core import EMPTY_STEP, ChoiceSpec, Finish, GroupSpec, KvBlock, KvPoolFull, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.warm_up import warm_up

PROMPT = prompt_of(20)
CONTEXT = 512  # of the tiny checkpoints


def ignore(block: KvBlock) -> None:
    """A hand-over without a receiver."""


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        *((group_of(prompt), InvalidRequest, "prompt") for prompt in ((), (1, 320), (1, -1), (1 << 40,))),
        (group_of(PROMPT, forced=[(400,)]), InvalidRequest, ""),
        (group_of(PROMPT, forced=[]), InvalidRequest, ""),
        (group_of(PROMPT, forced=[range(24)]), InvalidRequest, ""),
        (replace(group_of(PROMPT), choices=(ChoiceSpec(1), ChoiceSpec(1))), InvalidRequest, ""),
        (replace(group_of(PROMPT), num_prompt_tokens=21), InvalidRequest, ""),
        *(
            (group_of(prompt_of(length), sampling=replace(GREEDY, max_tokens=num_tokens)), ContextLengthExceeded, match)
            for length, num_tokens in ((CONTEXT - 23, 24), (CONTEXT, 1), (CONTEXT - 1, 2), (CONTEXT + 1, 1))
            for match in [f"exceed the context of {CONTEXT} tokens"]
        ),
    ],
)
def test_invalid_group_is_refused(model_of: ModelOf, group: GroupSpec, error: type[Exception], message: str) -> None:
    instance = model_of().instance()
    with pytest.raises(error) as refused:
        instance.prefill(group)
    assert message in str(refused.value) or message == getattr(refused.value, "field", "")
    assert_idle(instance)


@pytest.mark.parametrize(("length", "num_tokens"), [(1, 5), (1, CONTEXT - 1), (CONTEXT - 24, 24), (CONTEXT - 1, 1)])
def test_whole_context_length_is_usable(model_of: ModelOf, length: int, num_tokens: int) -> None:
    model = model_of()
    instance = model.instance()
    actual = answer(instance, prompt_of(length), sampling=replace(GREEDY, max_tokens=num_tokens))
    num_compared = min(num_tokens, 24)  # the reference is slow
    assert actual[:num_compared] == model.expected(prompt_of(length), num_compared)
    assert len(actual) == num_tokens
    assert_idle(instance)


def test_group_larger_than_pool_is_refused(model_of: ModelOf) -> None:
    instance = model_of().instance(num_pages=2)
    with pytest.raises(InvalidRequest, match="needs 3 KV pages, the slot has 2"):
        instance.prefill(group_of(PROMPT))
    instance.prefill(group_of(PROMPT), ignore)  # handed over, it needs its prompt's pages alone
    run(instance)
    assert_idle(instance)


def test_duplicate_group_id_is_refused_until_group_ends(model_of: ModelOf) -> None:
    instance = model_of().instance()
    instance.prefill(group_of(PROMPT))
    with pytest.raises(Conflict):
        instance.prefill(group_of(PROMPT))
    run(instance)
    instance.prefill(group_of(PROMPT))
    run(instance)
    assert_idle(instance)


def test_step_without_work_is_empty(model_of: ModelOf) -> None:
    assert model_of().instance().step() is EMPTY_STEP


def test_groups_wait_for_pages_in_order(model_of: ModelOf) -> None:
    """20 + 23 positions are 3 pages; of 4 pages one group runs at a time, also a small one that would fit beside."""
    model = model_of()
    instance = model_of().instance(num_pages=4)
    instance.prefill(group_of(PROMPT, "a/0"))
    instance.prefill(group_of(PROMPT, "b/0"))
    instance.prefill(group_of((5,), "c/0", replace(GREEDY, max_tokens=4)))
    steps = run(instance)
    assert [name for step in steps for name in step.prefilled] == ["a/0", "b/0", "c/0"]
    assert outputs(steps)["b/0", 0] == model.expected(PROMPT)
    assert outputs(steps)["c/0", 0] == model.expected((5,), 4)
    assert_idle(instance)


def test_step_counts_positions(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=16)
    instance.prefill(group_of(PROMPT))
    steps = run(instance)
    assert [step.num_positions_prefilled for step in steps[:3]] == [16, 4, 0]
    assert [step.prefilled for step in steps[:3]] == [(), ("r/0",), ()]
    assert sum(step.num_positions_decoded for step in steps) == GREEDY.max_tokens - 1
    assert [token.finish for token in steps[-1].tokens] == [Finish.LENGTH]
    assert all(step.step_s > 0 for step in steps)


@pytest.mark.parametrize("position", [0, 5])
def test_stop_token_ends_choice(model_of: ModelOf, position: int) -> None:
    model = model_of()
    expected = model.expected(PROMPT)
    stop = expected[position]
    instance = model.instance()
    instance.prefill(group_of(PROMPT, sampling=replace(GREEDY, stop_token_ids=frozenset({stop, 319}))))
    steps = run(instance)
    assert outputs(steps)["r/0", 0] == expected[: expected.index(stop) + 1]
    assert steps[-1].tokens[-1].finish is Finish.STOP
    assert_idle(instance)


def blind(group: GroupSpec) -> GroupSpec:
    return replace(group, prompt=())


def test_import_reserves_pages_and_frees_them_at_any_end(model_of: ModelOf) -> None:
    instance = model_of().instance(num_pages=4)
    group = blind(group_of(PROMPT))
    layout = instance.kv_layout(group)
    kv_import = instance.import_kv(group, layout)
    assert instance.num_free_pages == 1
    with pytest.raises(KvPoolFull):
        instance.import_kv(replace(group, group_id="s/0"), layout)
    with pytest.raises(Conflict, match="3 KV chunks of r/0 are missing"):
        kv_import.start({0: 1})
    assert not instance.has_work()
    kv_import.drop()
    kv_import.drop()
    assert_idle(instance)
    kv_import = instance.import_kv(group, layout)
    instance.cancel("r/0")
    assert_idle(instance)
    kv_import.write(0, bytes(layout.chunk_bytes(0)))  # a chunk that was under way
    kv_import.start({0: 1})
    assert_idle(instance)


def test_late_chunk_of_cancelled_import_is_ignored(model_of: ModelOf) -> None:
    model = model_of()
    instance = model_of().instance(num_pages=3)
    group = blind(group_of(PROMPT, "gone/0"))
    kv_import = instance.import_kv(group, instance.kv_layout(group))
    instance.cancel("gone/0")
    instance.prefill(group_of(PROMPT))  # takes the very pages that came free
    steps = [instance.step()]
    for index in range(kv_import.layout.num_kv_chunks):
        kv_import.write(index, b"\xff" * kv_import.layout.chunk_bytes(index))
    assert outputs([*steps, *run(instance)])["r/0", 0] == model.expected(PROMPT)


def test_mismatched_import_is_refused(model_of: ModelOf) -> None:
    instance = model_of().instance()
    group = blind(group_of(PROMPT))
    right = instance.kv_layout(group)
    wrong = [
        replace(right, block_tokens=0),
        replace(right, shape=replace(right.shape, num_layers=4)),
        KvLayout(right.shape, right.block_tokens, (replace(right.sequences[0], num_context_tokens=21),)),
    ]
    for layout in wrong:
        with pytest.raises(InvalidRequest):
            instance.import_kv(group, layout)
    kv_import = instance.import_kv(group, right)
    with pytest.raises(DataCorrupted):
        kv_import.write(0, bytes(8))
    for index in range(right.num_kv_chunks):
        kv_import.write(index, bytes(right.chunk_bytes(index)))
    assert kv_import.num_missing == 0
    with pytest.raises(InvalidRequest):
        kv_import.start({0: 320})
    kv_import.drop()
    assert_idle(instance)


def test_choice_ended_by_first_token_never_decodes(model_of: ModelOf) -> None:
    instance = model_of().instance()
    sampling = replace(GREEDY, stop_token_ids=frozenset({9}))
    group = GroupSpec("r/0", (), 20, sampling, tuple(ChoiceSpec(choice) for choice in range(4)))
    kv_import = instance.import_kv(group, instance.kv_layout(group))
    for index in range(kv_import.layout.num_kv_chunks):
        kv_import.write(index, bytes(kv_import.layout.chunk_bytes(index)))
    kv_import.start({0: 9, 1: 5, 3: 6})  # choice 2 was cancelled on the way
    instance.check_integrity()
    assert {choice for _, choice in outputs(run(instance))} == {1, 3}
    assert_idle(instance)


def test_imports_queue_behind_waiting_groups(model_of: ModelOf) -> None:
    instance = model_of().instance(num_pages=4)
    instance.prefill(group_of(PROMPT, "a/0"))
    instance.prefill(group_of(PROMPT, "b/0"))
    instance.step()
    small_group = GroupSpec("c/0", (), 4, replace(GREEDY, max_tokens=4), (ChoiceSpec(0),))
    with pytest.raises(KvPoolFull, match="1 groups are waiting"):
        instance.import_kv(small_group, instance.kv_layout(small_group))
    run(instance)
    instance.import_kv(small_group, instance.kv_layout(small_group)).drop()
    assert_idle(instance)


def test_pool_serves_models_in_succession(model_of: ModelOf) -> None:
    pool = KvPool(2 << 20)
    warm_up(pool)
    for family, dtype in (("llama", "float32"), ("qwen3", "bfloat16"), ("qwen2", "float32")):
        model = model_of(family, dtype=dtype)
        instance = Instance(model.pack.manifest, model.pack.view, pool)
        load_rest(instance)
        actual = answer(instance, PROMPT, sampling=SamplingParams(temperature=0, max_tokens=8))
        assert dtype == "bfloat16" or actual == model.expected(PROMPT, 8)
        assert_idle(instance)
        instance.close()


def test_long_prompt_reports_progress(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=32)
    for prompt, expected in ((prompt_of(80), [(32, 0), (64, 0)]), (prompt_of(30, 7), []), (prompt_of(80), [])):
        instance.prefill(group_of(prompt))
        steps = run(instance)
        progress = [(each.num_computed, each.num_cached) for step in steps for each in step.prompts]
        assert progress == expected  # of the prompt that came again all but the last pages are cached
        assert all(each.group_id == group_of(prompt).group_id for step in steps for each in step.prompts)


def test_prompt_progress_excludes_forced_output(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=16)
    instance.prefill(group_of(prompt_of(20), forced=[range(20)], sampling=SamplingParams(max_tokens=24)))
    assert [each.num_computed for step in run(instance) for each in step.prompts] == [16, 20]

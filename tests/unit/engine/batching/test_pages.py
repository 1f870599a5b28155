"""Pages: their tables and counts, and the prefix cache, by which a tenant's common prefixes are computed once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.harness import ModelOf, assert_idle, group_of, hand_over, outputs, prompt_of, run
from torchrelay.common.tokens.prefix_hashes import page_hashes, routing_hashes
from torchrelay.engine.batching.pages import PageAllocator, PageTables
from torchrelay.engine.core import KvPoolFull, SamplingParams, StepResult
from torchrelay.engine.instance import Instance


def test_tables_share_full_pages_of_context() -> None:
    pages = PageTables(42, page_tokens=8)
    tables = pages.reserve(num_context_tokens=20, num_tokens=33, num_tables=3)
    assert [len(table) for table in tables] == [5, 5, 5]
    assert len({tuple(table[:2]) for table in tables}) == 1
    own = [page for table in tables for page in table[2:]]
    assert len(set(own)) == 9
    assert pages.allocator.num_pages - pages.allocator.num_free == pages.pages_to_reserve(20, 33, 3) == 11
    pages.allocator.check_integrity(tables)
    pages.allocator.release(tables[1])
    pages.allocator.check_integrity([tables[0], tables[2]])
    with pytest.raises(AssertionError):
        pages.allocator.check_integrity([tables[0]])


def test_take_beyond_free_pages_takes_none() -> None:
    allocator = PageAllocator(4)
    held = allocator.take(3)
    with pytest.raises(KvPoolFull, match="2 KV pages are needed, 1 of 4 are free"):
        allocator.take(2)
    assert allocator.num_free == 1
    allocator.check_integrity([held])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "retain"]), st.integers(0, 9)), max_size=60))
def test_random_operations_keep_page_counts(moves: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(20)
    tables: list[list[int]] = []
    for move, number in moves:
        if move == "take" and number <= allocator.num_free:
            tables.append(allocator.take(number))
        elif move == "share" and tables:
            table = list(tables[number % len(tables)])
            allocator.share(table)
            tables.append(table)
        elif move == "release" and tables:
            allocator.release(tables.pop(number % len(tables)))
        elif move == "retain" and tables:
            for page in tables[number % len(tables)]:
                allocator.retained.add(page)
        allocator.check_integrity(tables)
        assert allocator.num_free == 20 - len({page for table in tables for page in table})


PAGE = 16
PROMPT = prompt_of(70)


def ask(instance: Instance, prompt: tuple[int, ...], tenant_id: str = "a") -> tuple[list[int], int, int]:
    """The tokens, and the numbers of cached and of computed prompt tokens."""
    instance.prefill(replace(group_of(prompt), tenant_id=tenant_id))
    return tokens_and_counts(run(instance))


def tokens_and_counts(steps: list[StepResult]) -> tuple[list[int], int, int]:
    tokens = [token for step in steps for token in step.tokens]
    num_prefilled = sum(step.num_positions_prefilled for step in steps)
    return [token.token_id for token in tokens], tokens[0].num_cached, num_prefilled


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_cached_prefix_is_not_recomputed(model_of: ModelOf, family: str) -> None:
    model = model_of(family)
    instance = model.instance()
    assert ask(instance, PROMPT) == (model.expected(PROMPT), 0, 70)
    assert ask(instance, PROMPT) == (model.expected(PROMPT), 64, 6)
    other = (*PROMPT[:40], *prompt_of(20, salt=3))
    assert ask(instance, other) == (model.expected(other), 32, 28)
    assert_idle(instance)


@pytest.mark.parametrize(("length", "num_cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_last_prompt_token_is_always_computed(model_of: ModelOf, length: int, num_cached: int) -> None:
    model = model_of()
    instance = model.instance()
    ask(instance, PROMPT[:length])
    actual = ask(instance, PROMPT[:length])
    assert actual == (model.expected(PROMPT[:length]), num_cached, length - num_cached)


def test_routing_keys_match_cached_pages(model_of: ModelOf) -> None:
    """The routing keys that the scheduler remembers of a prompt are keys of cached pages."""
    instance, prompt = model_of().instance(), prompt_of(150)
    ask(instance, prompt, tenant_id="a")
    known = instance._scheduler._prefixes._pages
    assert list(known) == list(page_hashes("a", prompt))
    routed_by = list(routing_hashes("a", prompt))
    assert len(routed_by) == 2 and set(routed_by) < set(known)
    assert instance._scheduler._prefixes.find("a", prompt)[:4][-1] == known[routed_by[0]]


def test_cache_is_separate_per_tenant(model_of: ModelOf) -> None:
    instance = model_of().instance()
    ask(instance, PROMPT, tenant_id="a")
    assert ask(instance, PROMPT, tenant_id="b")[1] == 0
    assert ask(instance, PROMPT, tenant_id="b")[1] == 64


def test_disabled_cache_caches_nothing(model_of: ModelOf) -> None:
    instance = model_of().instance(prefix_cache=False)
    assert [ask(instance, PROMPT)[1] for _ in range(2)] == [0, 0]
    assert_idle(instance)


@pytest.mark.parametrize("budget", [512, 20])
def test_cached_kv_is_handed_over(model_of: ModelOf, budget: int) -> None:
    model = model_of("qwen2")
    source = model.instance(token_budget=budget, kv_block_tokens=24)
    for num_cached in (0, 64):
        target = model.instance()
        last, steps = hand_over(source, target, group_of(PROMPT))
        first = [token.token_id for token in last.tokens]
        assert last.tokens[0].num_cached == num_cached
        assert first + outputs(steps)["r/0", 0] == model.expected(PROMPT)
    assert_idle(source)


def test_choices_and_resumed_output_use_cache(model_of: ModelOf) -> None:
    model = model_of()
    instance, expected = model.instance(), model.expected(PROMPT)
    ask(instance, PROMPT)
    instance.prefill(replace(group_of(PROMPT, forced=[(), expected[:5], ()]), tenant_id="a"))
    steps = run(instance)
    assert outputs(steps) == {("r/0", 0): expected, ("r/0", 1): expected[5:], ("r/0", 2): expected}
    assert {token.num_cached for step in steps for token in step.tokens[:1]} <= {0, 64}
    assert sum(step.num_positions_prefilled for step in steps) == (70 - 64) + (75 - 64)
    assert_idle(instance)


def test_longest_unused_pages_are_reclaimed_first(model_of: ModelOf) -> None:
    model = model_of()
    instance = model.instance(num_pages=12)
    prompts = [prompt_of(40, salt) for salt in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=2)
    for prompt in prompts:
        instance.prefill(replace(group_of(prompt, sampling=sampling), tenant_id="a"))
        run(instance)

    def num_cached(prompt: tuple[int, ...]) -> int:
        instance.prefill(replace(group_of(prompt, sampling=sampling), tenant_id="a"))
        return tokens_and_counts(run(instance))[1]

    assert num_cached(prompts[3]) == 32
    whole = prompt_of(160, salt=9)
    instance.prefill(replace(group_of(whole, sampling=sampling), tenant_id="a"))  # takes eleven pages of twelve
    assert outputs(run(instance))["r/0", 0] == model.expected(whole, 2)
    assert num_cached(prompts[0]) == 0
    assert_idle(instance)


def test_cancelled_prefill_caches_nothing(model_of: ModelOf) -> None:
    model = model_of()
    instance = model.instance(token_budget=20)
    instance.prefill(replace(group_of(PROMPT), tenant_id="a"))
    instance.step()
    instance.cancel("r/0")
    assert ask(instance, PROMPT) == (model.expected(PROMPT), 0, 70)

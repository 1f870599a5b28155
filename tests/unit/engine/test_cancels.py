"""Thousands of cancels at random moments: of groups and choices that wait, run in chunks or by layers, decode, were
had their KV imported, or were exported or preempted. No page leaks, and nothing is left behind.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.harness import Model, ModelOf, assert_idle, group_of, half_loaded, prompt_of
from torchrelay.common.errors import Conflict
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.sequences import BatchPlan, GroupState, SequenceGroup
from torchrelay.engine.core import GroupSpec, KvBlock, KvPoolFull, NewToken, SamplingParams
from torchrelay.engine.instance import Instance

NUM_CANCELS = 1_250
CONTEXT = 48
LONGEST = 9  # output tokens of a group
TENANTS = ("a", "b", "c")


def random_group(chance: random.Random, number: int) -> GroupSpec:
    """A group with a prompt of one token up to the whole context; prompts of a kind share a prefix."""
    length = chance.choice([1, 4, 17, 32, CONTEXT - 3, CONTEXT - 1])
    num_tokens = chance.randint(1, min(LONGEST, CONTEXT - length))
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens)
    forced = [(7,) * chance.randrange(min(3, num_tokens)) for _ in range(chance.choice([1, 1, 2, 4]))]
    group = group_of(prompt_of(length, chance.randrange(2)), f"{number}/0", sampling, forced)
    return replace(group, tenant_id=chance.choice(TENANTS))


class ScriptedScheduler:
    """A scheduler without a model: every token is 7, and nothing is computed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pages = PageTables(64, page_tokens=4)
        prefixes = PrefixCache(self.pages.allocator, 4)
        latency = LatencyModel(decode=StepCost(1.0, 0.5, 0.0, num_steps=1))
        self.scheduler = BatchScheduler(
            self.pages, prefixes, 40, CONTEXT, lambda source, target: None, latency=lambda: latency
        )
        self.groups: list[SequenceGroup] = []
        self.num_made = self.num_cancelled = 0

    def add(self) -> None:
        self.num_made += 1
        spec = random_group(self.chance, self.num_made)
        way = self.chance.random()
        if way < 0.1:
            group = SequenceGroup.of(replace(spec, prompt=()))
            try:
                self.scheduler.receive(group)
            except KvPoolFull:
                return
        else:
            on_kv = (lambda block: None) if way < 0.35 else None
            group = SequenceGroup.of(spec, on_kv, (lambda: None) if way < 0.25 else None)
            self.scheduler.submit(group)
        self.groups.append(group)

    def step(self) -> None:
        if self.chance.random() < 0.2:  # as if weights were missing
            self.scheduler.admit(by_layer=True)
            for group in self.scheduler.by_layer[:1]:
                group.layer = 1
            return
        for plan in self.scheduler.plan():
            self.scheduler.commit(plan, tokens_of(plan))

    def start(self, group: SequenceGroup, count: int) -> None:
        for context in group.contexts[:count]:
            continues = len(context.forced) + 1 < group.spec.sampling.max_tokens and group.on_kv is None
            self.scheduler.start(context, dict.fromkeys(context.choices, 7) if continues else {})

    def disturb(self) -> None:
        group = self.chance.choice(self.groups)
        way = self.chance.random()
        if way < 0.1:
            try:
                self.scheduler.preempt(group.spec.group_id)
            except Conflict:
                is_moving = group.state in (GroupState.RECEIVING, GroupState.SENDING)
                assert is_moving or not group.spec.prompt or group.num_pages
        elif way < 0.3 and group.state is GroupState.RECEIVING:
            if group.spec.prompt:
                group.layer = 1
                self.scheduler.run(group)
            else:
                self.start(group, len(group.contexts))
        elif way < 0.4 and group.state is GroupState.RUNNING and group.can_be_exported:
            self.scheduler.hold(group)
        else:
            choice = self.chance.choice([None, *(each.choice for each in group.spec.choices)])
            self.num_cancelled += self.scheduler.cancel(group.spec.group_id, choice)


def tokens_of(plan: BatchPlan) -> list[NewToken]:
    """The tokens of a step that samples only 7."""
    places = [(each.spec, each.choice, each.next_position) for each in plan.decoding]
    ended = [chunk.context for chunk in plan.chunks if chunk.ends_context]
    places += [(each.group.spec, choice, len(each.forced)) for each in ended for choice in each.choices]
    return [
        NewToken(spec.group_id, choice, position, 7, spec.sampling.finish_of(7, position))
        for spec, choice, position in places
    ]


@pytest.mark.parametrize("seed", range(2))
def test_scheduler_survives_random_cancels(seed: int) -> None:
    scripted = ScriptedScheduler(seed)
    places = set()
    while scripted.num_cancelled < NUM_CANCELS:
        while len(scripted.groups) < 12:
            scripted.add()
        if scripted.chance.random() < 0.6:
            scripted.step()
        scripted.disturb()
        scripted.scheduler.check_integrity()
        places |= {group.state for group in scripted.groups}
        scripted.groups = [group for group in scripted.groups if group.state is not GroupState.GONE]
    assert places == set(GroupState)
    for group in scripted.groups:
        scripted.scheduler.cancel(group.spec.group_id)
    scripted.scheduler.check_integrity()
    assert scripted.pages.allocator.num_free == scripted.pages.allocator.num_pages


class ComparedInstance:
    """An instance of a tiny model whose tokens are compared with transformers'."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.chance = model, random.Random(seed)
        self.instance = model.instance(num_pages=120, page_tokens=4, token_budget=24, kv_block_tokens=6)
        self.specs: dict[str, GroupSpec] = {}
        self.open: dict[str, dict[int, int]] = {}  # group -> choice -> its tokens so far
        self.handed_over: set[str] = set()  # groups that end with their prefill
        self.num_made = self.num_compared = self.num_finished = 0
        self.cancelled: Counter[str] = Counter()

    def add(self) -> None:
        self.num_made += 1
        spec = random_group(self.chance, self.num_made)
        self.specs[spec.group_id] = spec
        self.open[spec.group_id] = {each.choice: len(each.forced_output) for each in spec.choices}
        on_kv: Callable[[KvBlock], None] | None = None
        if self.chance.random() < 0.2:
            on_kv = lambda block: None  # noqa: E731
            self.handed_over.add(spec.group_id)
        self.instance.prefill(spec, on_kv)

    def step(self) -> None:
        result = self.instance.step()
        for token in result.tokens:
            self.compare(token)
        for group_id in set(result.prefilled) & self.handed_over:
            self.open.pop(group_id, None)

    def compare(self, token: NewToken) -> None:
        # A KeyError would be a token of a cancelled choice.
        spec, choices = self.specs[token.group_id], self.open[token.group_id]
        forced = next(each.forced_output for each in spec.choices if each.choice == token.choice)
        assert token.position == choices[token.choice]
        expected = self.model.expected((*spec.prompt, *forced), LONGEST)
        assert token.token_id == expected[token.position - len(forced)]
        choices[token.choice] += 1
        self.num_compared += 1
        if token.finish:
            self.num_finished += 1
            self.close(token.group_id, token.choice)

    def cancel(self) -> None:
        group_id = self.chance.choice(list(self.open))
        spec, choices = self.specs[group_id], self.open[group_id]
        choice = self.chance.choice([None, *choices])
        begun = any(choices[each.choice] > len(each.forced_output) for each in spec.choices if each.choice in choices)
        self.cancelled["decoding" if begun else "before its first token"] += 1
        if self.chance.random() < 0.2:
            self.instance.cancel_soon(group_id, choice)
        else:
            self.instance.cancel(group_id, choice)
        self.close(group_id, choice)

    def close(self, group_id: str, choice: int | None) -> None:
        choices = self.open[group_id]
        for each in [choice] if choice is not None else list(choices):
            del choices[each]
        if not choices:
            del self.open[group_id]


def test_instance_survives_random_cancels(model_of: ModelOf) -> None:
    run = ComparedInstance(model_of("qwen2"), seed=5)
    while sum(run.cancelled.values()) < NUM_CANCELS:
        while len(run.open) < 6:
            run.add()
        if run.chance.random() < 0.6:
            run.step()
        if run.open and run.chance.random() < 0.05:
            with suppress(Conflict):
                run.instance.preempt(run.chance.choice(list(run.open)))
        if run.open:
            run.cancel()
        run.instance.check_integrity()
    assert min(run.cancelled.values()) > NUM_CANCELS // 10, run.cancelled
    assert run.num_compared > NUM_CANCELS // 10 and run.num_finished > NUM_CANCELS // 100
    while run.instance.has_work():
        run.step()
        run.instance.check_integrity()
    assert not run.open
    assert_idle(run.instance)


class MovingPrompts:
    """Two instances of a tiny model, which pass prompts to each other. The first has two layers of three."""

    def __init__(self, model: Model, seed: int) -> None:
        self.chance = random.Random(seed)
        settings: dict[str, Any] = {"num_pages": 120, "page_tokens": 4, "token_budget": 24, "kv_block_tokens": 6}
        self.instances = [half_loaded(model, 2, **settings), model.instance(**settings)]
        self.names: list[str] = []
        self.num_made = self.num_imported = 0

    def add(self, instance: Instance) -> None:
        self.num_made += 1
        spec = random_group(self.chance, self.num_made)
        self.names.append(spec.group_id)

        def take(block: KvBlock) -> None:
            assert len(block.data) == instance.kv_layout(spec).chunk_bytes(block.index)

        instance.prefill(spec, self.chance.choice([None, None, take]))

    def move(self) -> None:
        """Moves a prompt to the other instance; it may be cancelled before all chunks have arrived."""
        source, target = self.chance.sample(self.instances, 2)
        groups = [each for each in source.groups() if each.can_be_exported and each.layer]
        if not groups:
            return
        group = self.chance.choice(groups)
        group_id = group.spec.group_id
        has_pages: list[bool] = []
        prefill_import = target.import_prefill(group.spec_left(), group.on_kv, lambda: has_pages.append(True))
        if not has_pages:
            target.cancel(group_id)
            return
        exported = source.export_prefill(group_id)
        layout = prefill_import.receive(exported.layout.boundary, exported.layout.block_tokens)
        stops = self.chance.randrange(layout.num_chunks + 1) if self.chance.random() < 0.5 else layout.num_chunks
        for index in range(stops):
            prefill_import.write(index, exported.read(index))
            if self.chance.random() < 0.05:
                target.cancel(group_id)
            if self.chance.random() < 0.05:
                source.step()
        source.cancel(group_id)
        if not prefill_import.num_missing:
            prefill_import.start()
            self.num_imported += 1
        elif self.chance.random() < 0.5:
            prefill_import.start_over()
        else:
            target.cancel(group_id)
            prefill_import.start()

    def disturb(self) -> None:
        instance, name = self.chance.choice(self.instances), self.chance.choice(self.names[-20:])
        way = self.chance.random()
        if way < 0.15:
            with suppress(Conflict):
                instance.preempt(name)
        elif way < 0.6:
            self.move()
        elif way < 0.7:
            instance.cancel_soon(name, self.chance.choice([None, 0, 1]))
        else:
            instance.cancel(name, self.chance.choice([None, 0, 1, 2]))


@pytest.mark.parametrize("seed", range(3))
def test_prompts_move_between_instances_at_random(model_of: ModelOf, seed: int) -> None:
    moving = MovingPrompts(model_of("qwen2"), seed)
    for _ in range(300):
        for instance in moving.instances:
            if len(instance.groups()) < 5:
                moving.add(instance)
        moving.chance.choice(moving.instances).step()
        for _ in range(3):
            moving.disturb()
            for instance in moving.instances:
                instance.check_integrity()
    assert moving.num_imported > 10
    for instance in moving.instances:
        while instance.has_work():
            instance.step()
            instance.check_integrity()
        for group in instance.groups():  # those that wait for the last layer
            instance.cancel(group.spec.group_id)
        assert_idle(instance)

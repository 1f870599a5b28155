"""Random lives of groups on two instances, of which one is still loading: every token is right, and no page leaks."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.harness import (
    GREEDY,
    Model,
    ModelOf,
    assert_idle,
    group_of,
    half_loaded,
    load_rest,
    outputs,
    prompt_of,
    run,
)
from torchrelay.common.errors import Conflict
from torchrelay.engine.batching.sequences import GroupState
from torchrelay.engine.core import GroupSpec, KvBlock, KvPoolFull, NewToken, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.kv_import import KvImport

SAMPLED = SamplingParams(
    temperature=1.2,
    top_p=0.9,
    seed=11,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((7, 1.5),),
    top_logprobs=3,
)
NUM_ROUNDS = 500
CONTEXT = 48
LONGEST = 9  # output tokens of a group


class Lives:
    """Groups wait, run in chunks or by layers, decode, are handed over, received, moved, preempted and cancelled."""

    def __init__(self, model: Model, seed: int, num_pages: int) -> None:
        self.model, self.random = model, random.Random(seed)
        settings: dict[str, Any] = {"page_tokens": 4, "token_budget": 24, "kv_block_tokens": 6}
        self.loading = half_loaded(model, 2, num_pages=num_pages, **settings)
        self.whole = model.instance(num_pages=num_pages, **settings)
        self.specs: dict[str, GroupSpec] = {}
        self.place: dict[str, Instance] = {}
        self.open: dict[str, dict[int, int]] = {}  # group -> choice -> position of its next token
        self.cancelled_soon: set[str] = set()  # groups whose instance applies a cancel with its next step
        self.handed_over: set[str] = set()  # groups that end with their prefill
        self.undisturbed: set[str] = set()  # groups of which no choice was cancelled
        self.blocks: dict[str, set[int]] = {}  # what the instance of a group has handed over
        self.kv_imports: list[KvImport] = []
        self.alone: dict[str, dict[tuple[str, int], list[int]]] = {}  # the tokens of sampled groups
        self.states: set[GroupState] = set()
        self.counts: Counter[str] = Counter()

    @property
    def instances(self) -> tuple[Instance, Instance]:
        return self.loading, self.whole

    def group(self) -> GroupSpec:
        """A group with a prompt of one token up to the whole context; prompts of a kind share a prefix."""
        length = self.random.choice([1, 4, 17, 32, CONTEXT - 3, CONTEXT - 1])
        num_tokens = self.random.randint(1, min(LONGEST, CONTEXT - length))
        sampling = replace(self.random.choice([GREEDY, GREEDY, SAMPLED]), max_tokens=num_tokens)
        forced = [(7,) * self.random.randrange(min(3, num_tokens)) for _ in range(self.random.choice([1, 1, 2, 4]))]
        group = group_of(prompt_of(length, self.random.randrange(2)), f"{len(self.specs)}/0", sampling, forced)
        self.specs[group.group_id] = group = replace(group, tenant_id=self.random.choice("abc"))
        return group

    def add(self) -> None:
        instance, group = self.random.choice(self.instances), self.group()

        self.blocks[group.group_id] = blocks = set[int]()

        def take(block: KvBlock) -> None:
            assert block.index not in blocks
            blocks.add(block.index)

        hands_over = self.random.random() < 0.25
        if hands_over:
            self.handed_over.add(group.group_id)
        self.place[group.group_id] = instance
        self.undisturbed.add(group.group_id)
        self.open[group.group_id] = {each.choice: len(each.forced_output) for each in group.choices}
        instance.prefill(group, take if hands_over else None)

    def receive(self) -> None:
        """Reserves pages for KV, of zeros: the tokens of its group are not compared."""
        group = replace(self.group(), prompt=())
        with suppress(KvPoolFull):
            self.kv_imports.append(self.whole.import_kv(group, self.whole.kv_layout(group)))

    def settle(self) -> None:
        """Fills and starts an import of KV, or ends it halfway."""
        if not self.kv_imports:
            return
        kv_import = self.kv_imports.pop(self.random.randrange(len(self.kv_imports)))
        group, indices = kv_import.group, list(range(kv_import.layout.num_kv_chunks))
        self.random.shuffle(indices)
        way = self.random.choice(["start", "start", "drop", "cancel"])
        for index in indices if way == "start" else indices[: len(indices) // 2]:
            kv_import.write(index, bytes(kv_import.layout.chunk_bytes(index)))
        if way == "start":
            chosen = [each.choice for each in group.choices if self.random.random() < 0.8]
            continues = [
                each for each in chosen if group.sampling.max_tokens > len(group.choices[each].forced_output) + 1
            ]
            kv_import.start(dict.fromkeys(continues, 3))
            self.counts["received"] += 1
        elif way == "cancel":
            self.whole.cancel(group.group_id)
        else:
            kv_import.drop()

    def step(self, instance: Instance) -> None:
        result = instance.step()
        self.cancelled_soon = {group_id for group_id in self.cancelled_soon if self.place[group_id] is not instance}
        for token in result.tokens:
            if token.group_id in self.place:
                self.compare(token)
        for group_id in set(result.prefilled) & self.handed_over:
            if group_id in self.undisturbed:
                assert len(self.blocks[group_id]) == instance.kv_layout(self.specs[group_id]).num_kv_chunks
                self.counts["handed over"] += 1
            self.open.pop(group_id, None)

    def compare(self, token: NewToken) -> None:
        # A KeyError would be a token of a cancelled choice.
        spec, choices = self.specs[token.group_id], self.open[token.group_id]
        forced = next(each.forced_output for each in spec.choices if each.choice == token.choice)
        assert token.position == choices[token.choice]
        expected = self.expected_of(spec, token.choice, forced)
        assert token.token_id == expected[token.position - len(forced)]
        assert (token.logprobs is not None) == (spec.sampling.top_logprobs is not None)
        choices[token.choice] += 1
        if token.finish:
            self.counts["finished"] += 1
            self.close(token.group_id, token.choice)

    def expected_of(self, spec: GroupSpec, choice: int, forced: tuple[int, ...]) -> list[int]:
        """The greedy tokens of transformers, or what an instance samples for the group alone."""
        if spec.sampling.greedy:
            return self.model.expected((*spec.prompt, *forced), LONGEST)
        if spec.group_id not in self.alone:
            instance = self.model.instance()
            instance.prefill(spec)
            self.alone[spec.group_id] = outputs(run(instance))
        return self.alone[spec.group_id][spec.group_id, choice]

    def close(self, group_id: str, choice: int | None = None) -> None:
        self.undisturbed.discard(group_id)
        choices = self.open.get(group_id, {})
        for each in [choice] if choice is not None else list(choices):
            choices.pop(each, None)
        if not choices:
            self.open.pop(group_id, None)

    def cancel(self) -> None:
        group_id = self.random.choice(list(self.open))
        spec, choices, instance = self.specs[group_id], self.open[group_id], self.place[group_id]
        choice = self.random.choice([None, *choices])
        begun = any(choices[each.choice] > len(each.forced_output) for each in spec.choices if each.choice in choices)
        self.counts["cancelled " + ("decoding" if begun else "before its first token")] += 1
        if self.random.random() < 0.3:
            instance.cancel_soon(group_id, choice)
            self.cancelled_soon.add(group_id)
        else:
            instance.cancel(group_id, choice)
        instance.cancel(group_id, 7)  # no choice of it
        self.close(group_id, choice)

    def preempt(self) -> None:
        group_id = self.random.choice(list(self.open))
        with suppress(Conflict):
            self.place[group_id].preempt(group_id)
            self.counts["preempted"] += 1

    def move(self) -> None:
        """Moves a prompt to the other instance; its attempt may be cancelled before all chunks have arrived."""
        source, target = self.random.sample(self.instances, 2)
        groups = [each for each in source.groups() if each.can_be_exported and each.layer]
        groups = [each for each in groups if each.spec.group_id not in self.cancelled_soon]
        if not groups:
            return
        group = self.random.choice(groups)
        group_id, has_pages = group.spec.group_id, list[bool]()
        prompt_import = target.import_prefill(group.spec_left(), group.on_kv, lambda: has_pages.append(True))
        if not has_pages:
            target.cancel(group_id)
            return
        exported = source.export_prefill(group_id)
        self.note_states()
        layout = prompt_import.receive(exported.layout.shape.num_layers, exported.layout.block_tokens)
        stops = self.random.randrange(layout.num_chunks + 1) if self.random.random() < 0.5 else layout.num_chunks
        for index in range(stops):
            prompt_import.write(index, exported.read(index))
            if self.random.random() < 0.03:
                target.cancel(group_id)
                self.close(group_id)
            if self.random.random() < 0.05:
                self.step(source)
        source.cancel(group_id)
        self.place[group_id] = target
        self.blocks[group_id].clear()  # the target hands over all layers
        if not prompt_import.num_missing:
            prompt_import.start()
            self.counts["moved"] += 1
        elif self.random.random() < 0.5:
            prompt_import.start_over()
        else:
            target.cancel(group_id)
            self.close(group_id)
            prompt_import.start()

    def note_states(self) -> None:
        self.states |= {each.state for instance in self.instances for each in instance.groups()}

    def act(self) -> None:
        moves = [
            self.receive,
            self.settle,
            *[self.move] * 2,
            *[self.cancel, self.cancel, self.preempt] * bool(self.open),
        ]
        while len(self.open) < 8:
            self.add()
        self.random.choice(moves)()
        self.step(self.random.choice(self.instances))
        self.note_states()
        for instance in self.instances:
            instance.check_integrity()


@pytest.mark.parametrize(("seed", "num_pages"), [(0, 120), (1, 120), (2, 40), (3, 40)])
def test_tokens_are_right_and_no_page_leaks(model_of: ModelOf, seed: int, num_pages: int) -> None:
    lives = Lives(model_of("qwen2"), seed, num_pages)
    for number in range(NUM_ROUNDS):
        if number == NUM_ROUNDS * 2 // 3:
            load_rest(lives.loading)
        lives.act()
    while lives.kv_imports:
        lives.settle()
    for instance in lives.instances:
        while instance.has_work():
            lives.step(instance)
            instance.check_integrity()
        assert_idle(instance)
    assert not lives.open
    assert lives.states == {*GroupState} - {GroupState.GONE}
    assert min(lives.counts.values()) > 3 and len(lives.counts) == 7, lives.counts

"""After any sequence of moves all pages are accounted for, and free at the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.unit.engine.harness import Model, ModelOf, assert_idle, group_of, prompt_of
from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.core import GroupSpec, KvBlock, KvPoolFull, NewToken, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.kv_import import KvImport

NUM_MOVES = 150


class RandomMoves:
    """Random moves on an instance with few pages, from a seed."""

    def __init__(self, model: Model, seed: int) -> None:
        self.random = random.Random(seed)
        self.instance: Instance = model.instance(num_pages=40, page_tokens=4, token_budget=13, kv_block_tokens=6)
        self.model = model
        self.groups: dict[str, GroupSpec] = {}
        self.kv_imports: list[KvImport] = []
        self.cancelled: set[tuple[str, int]] = set()
        self.tokens: list[NewToken] = []

    def group(self) -> GroupSpec:
        length = self.random.randint(1, 20)
        sampling = SamplingParams(temperature=0, max_tokens=self.random.randint(3, 12))
        forced = [(7,) * self.random.choice([0, 0, 0, 1, 2]) for _ in range(self.random.randint(1, 3))]
        group = group_of(prompt_of(length, self.random.randrange(9)), f"g{len(self.groups)}/0", sampling, forced)
        self.groups[group.group_id] = group
        return group

    def prefill(self) -> None:
        group = self.group()
        hands_over = self.random.random() < 0.4
        if hands_over:
            self.cancelled |= {(group.group_id, choice.choice) for choice in group.choices}  # ends early

        def take(block: KvBlock) -> None:
            assert len(block.data) == self.instance.kv_layout(group).chunk_bytes(block.index)

        self.instance.prefill(group, take if hands_over else None)

    def import_kv(self) -> None:
        group = replace(self.group(), prompt=())
        self.cancelled |= {(group.group_id, choice.choice) for choice in group.choices}  # has no first token here
        try:
            self.kv_imports.append(self.instance.import_kv(group, self.instance.kv_layout(group)))
        except KvPoolFull:
            del self.groups[group.group_id]
            self.groups[f"{group.group_id}-refused"] = group

    def settle(self) -> None:
        """Fills and starts an import, or drops it halfway."""
        if not self.kv_imports:
            return
        kv_import = self.kv_imports.pop(self.random.randrange(len(self.kv_imports)))
        indices = list(range(kv_import.layout.num_kv_chunks))
        self.random.shuffle(indices)
        complete = self.random.random() < 0.6
        for index in indices if complete else indices[: len(indices) // 2]:
            kv_import.write(index, bytes(kv_import.layout.chunk_bytes(index)))
        if complete:
            chosen = [choice.choice for choice in kv_import.group.choices if self.random.random() < 0.8]
            kv_import.start(dict.fromkeys(chosen, 3))
        else:
            kv_import.drop()

    def cancel(self) -> None:
        if not self.groups:
            return
        group = self.random.choice(list(self.groups.values()))
        choice = self.random.choice([None, *(choice.choice for choice in group.choices)])
        gone = [spec.choice for spec in group.choices if choice in (None, spec.choice)]
        self.cancelled |= {(group.group_id, each) for each in gone}
        self.instance.cancel(group.group_id, choice)

    def step(self) -> None:
        self.tokens += self.instance.step().tokens

    def move(self) -> None:
        moves = [self.prefill, self.import_kv, self.settle, self.cancel, *[self.step] * 6]
        self.random.choice(moves)()
        self.instance.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_leak_no_page(model_of: ModelOf, seed: int) -> None:
    moves = RandomMoves(model_of(), seed)
    for _ in range(NUM_MOVES):
        moves.move()
    while moves.kv_imports:
        moves.settle()
    while moves.instance.has_work():
        moves.step()
        moves.instance.check_integrity()
    assert_idle(moves.instance)
    num_finished = 0
    for group in moves.groups.values():
        for spec in group.choices:
            if (group.group_id, spec.choice) in moves.cancelled:
                continue
            key = (group.group_id, spec.choice)
            got = [token.token_id for token in moves.tokens if (token.group_id, token.choice) == key]
            context = (*group.prompt, *spec.forced_output)
            assert got == moves.model.expected(context, group.sampling.max_tokens - len(spec.forced_output))
            num_finished += 1
    assert num_finished > 3


def test_refused_group_leaves_nothing(model_of: ModelOf) -> None:
    moves = RandomMoves(model_of(), 0)
    with pytest.raises(InvalidRequest):
        moves.instance.prefill(group_of(prompt_of(200)))
    assert_idle(moves.instance)

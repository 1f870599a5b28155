"""Helpers of the engine's tests: a model with its reference, and loops that run instances to the end."""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import greedy_reference, reference_model
from tests.support.packs import Pack, build_pack
from tests.support.wait import wait_until
from torchrelay.common.tokens.prefix_hashes import PAGE_TOKENS
from torchrelay.engine.core import ChoiceSpec, GroupSpec, KvBlock, NewToken, SamplingParams, StepResult
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.layout import KvLayout, KvShape
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.kv.prefill_import import PrefillImport
from torchrelay.modelspec.config import read_config

# Of the tests whose tokens are exact in fp32. On a machine with a GPU, TRITON_INTERPRET=0 adds it; it has never been.
DEVICES = ("cpu", "cuda:0") if os.environ["TRITON_INTERPRET"] == "0" else ("cpu",)
on_each_device = pytest.mark.parametrize("device", DEVICES)
POOL_BYTES = 4 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@dataclass
class Model:
    """A checkpoint in three forms: the folder, its pack, and transformers."""

    folder: Path
    _expected: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @cached_property
    def pack(self) -> Pack:
        return build_pack(self.folder)

    @cached_property
    def reference(self) -> Any:
        return reference_model(self.folder)

    def expected(self, prompt: Sequence[int], num_tokens: int = GREEDY.max_tokens) -> list[int]:
        """transformers' greedy continuation."""
        key = (*prompt, num_tokens)
        if key not in self._expected:
            self._expected[key] = greedy_reference(self.reference, list(prompt), num_tokens)
        return self._expected[key]

    @torch.no_grad()
    def logits(self, *prompts: Sequence[int]) -> torch.Tensor:
        """transformers' logits after prompts of the same length, fp32 [prompt, vocab]."""
        logits: torch.Tensor = self.reference(torch.tensor(prompts)).logits[:, -1].float()
        return logits

    @torch.no_grad()
    def true_logits(self, *prompts: Sequence[int]) -> torch.Tensor:
        """The logits computed in fp32 with the same weights."""
        logits: torch.Tensor = self._wide(torch.tensor(prompts)).logits[:, -1]
        return logits

    @cached_property
    def _wide(self) -> Any:
        return deepcopy(self.reference).float()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per position."""
        manifest = self.pack.manifest
        return KvShape.of(read_config(manifest.config), manifest.dtype).bytes_per_token

    def instance(
        self,
        *,
        loaded: bool = True,
        pool_bytes: int = POOL_BYTES,
        num_pages: int | None = None,
        device: str = "cpu",
        **settings: Any,
    ) -> Instance:
        """An instance; ``num_pages`` of the pool replace ``pool_bytes``."""
        if num_pages is not None:
            pool_bytes = num_pages * settings.get("page_tokens", PAGE_TOKENS) * self.bytes_per_token
        instance = Instance(self.pack.manifest, self.pack.view, KvPool(pool_bytes, device), **settings)
        for segment in range(len(self.pack.manifest.segments) if loaded else 0):
            instance.segment_ready(segment)
        if loaded and (stager := instance.model.weights._stager) is not None:
            wait_until(lambda: instance.is_ready, "the copies of all segments")
            stager.close()  # its threads keep pinned memory
        return instance


ModelOf = Callable[..., Model]


class Clock:
    """A clock that the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt without a pattern, the same every time."""
    return tuple((i * i * 31 + i * 7 + salt * 101 + 5) % 256 for i in range(length))


def group_of(
    prompt: Sequence[int],
    group_id: str = "r/0",
    sampling: SamplingParams = GREEDY,
    forced: Sequence[Sequence[int]] = ((),),
) -> GroupSpec:
    """A group with a choice per entry of ``forced``."""
    choices = tuple(ChoiceSpec(choice, tuple(output)) for choice, output in enumerate(forced))
    distinct = array("q", sorted(set(prompt)) if sampling.penalises_prompt else ())
    return GroupSpec(group_id, tuple(prompt), len(prompt), sampling, choices, distinct_prompt_tokens=distinct)


def run(instance: Instance) -> list[StepResult]:
    """Steps until there is nothing to do; the page tables are checked after each."""
    steps = []
    while instance.has_work():
        steps.append(instance.step())
        instance.check_integrity()
    return steps


def answer(
    instance: Instance,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    forced: Sequence[Sequence[int]] = ((),),
) -> list[int]:
    """The tokens of a prompt's first choice, which the instance computes with all that is waiting there."""
    instance.prefill(group_of(prompt, sampling=sampling, forced=forced))
    return outputs(run(instance))["r/0", 0]


def assert_batch_is_exact(
    model: Model, instance: Instance, lengths: Sequence[int], num_tokens: int = GREEDY.max_tokens
) -> list[StepResult]:
    """Checks that prompts of some lengths, all at once, have the tokens that transformers gives to each."""
    expected, sampling = {}, replace(GREEDY, max_tokens=num_tokens)
    for number, length in enumerate(lengths):
        expected[f"{number}/0", 0] = model.expected(prompt_of(length), num_tokens)
        instance.prefill(group_of(prompt_of(length), f"{number}/0", sampling))
    steps = run(instance)
    assert outputs(steps) == expected
    assert_idle(instance)
    return steps


def load_rest(instance: Instance) -> None:
    """Delivers the segments that are missing, in order."""
    for segment in range(instance.num_segments_ready, instance.config.num_layers + 2):
        instance.segment_ready(segment)


def last_logits(instance: Instance, prompt: Sequence[int]) -> torch.Tensor:
    """The logits of the first output token, fp32 [vocab]."""
    seen: list[torch.Tensor] = []
    logits = instance.model.transformer.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    instance.model.transformer.logits = spy  # type: ignore[method-assign]
    instance.prefill(group_of(prompt, sampling=SamplingParams(temperature=0, max_tokens=1)))
    run(instance)
    return seen[0][0].float().cpu()


def outputs(steps: Sequence[StepResult]) -> dict[tuple[str, int], list[int]]:
    """Token ids by (group, choice); positions must rise one by one, and nothing may follow a finish."""
    actual: dict[tuple[str, int], list[NewToken]] = defaultdict(list)
    for token in (token for step in steps for token in step.tokens):
        earlier = actual[token.group_id, token.choice]
        if earlier:
            assert earlier[-1].finish is None
            assert token.position == earlier[-1].position + 1
        earlier.append(token)
    return {key: [token.token_id for token in tokens] for key, tokens in actual.items()}


def assert_idle(instance: Instance) -> None:
    """Checks that all pages are free and all counts are right."""
    instance.check_integrity()
    assert instance.num_free_pages == instance.num_pages
    assert not instance.has_work()


def copy_into(blocks: dict[int, bytes], group_id: str = "r/0") -> Callable[[KvBlock], None]:
    """An ``on_kv`` that copies the blocks of a group, and checks that none comes twice."""

    def copy(block: KvBlock) -> None:
        assert block.group_id == group_id and block.index not in blocks
        blocks[block.index] = bytes(block.data)

    return copy


def hand_over(
    source: Instance, target: Instance, group: GroupSpec, order: int = 1
) -> tuple[StepResult, list[StepResult]]:
    """Prefill on one instance, decode on the other; ``order`` -1 delivers the chunks backwards.

    Gives the last prefill step and all decode steps.
    """
    blocks: dict[int, bytes] = {}
    layout = source.kv_layout(group)
    source.prefill(group, copy_into(blocks, group.group_id))
    last = [step for step in run(source) if step.prefilled][-1]
    firsts = [token for token in last.tokens if token.group_id == group.group_id]
    assert sorted(blocks) == list(range(layout.num_kv_chunks))
    trailer = layout.unpack_trailer(group.group_id, layout.pack_trailer(firsts))
    blind = replace(group, prompt=())
    kv_import = target.import_kv(blind, layout)
    for index in list(blocks)[::order]:
        kv_import.write(index, blocks[index])
    kv_import.start({token.choice: token.token_id for token in trailer})
    return last, run(target)


def half_loaded(model: Model, num_layers: int, **settings: Any) -> Instance:
    """An instance with its embeddings and its first layers."""
    instance = model.instance(loaded=False, **settings)
    for segment in range(num_layers + 1):
        instance.segment_ready(segment)
    wait_until(lambda: instance.num_segments_ready == num_layers + 1, "the copies of the first segments")
    return instance


@dataclass(frozen=True)
class Exported:
    """All of an export, which has left its instance."""

    spec: GroupSpec
    layout: KvLayout
    chunks: tuple[bytes, ...]


def export_prefill(source: Instance, group_id: str = "r/0") -> Exported:
    exported = source.export_prefill(group_id)
    chunks = tuple(bytes(exported.read(index)) for index in range(exported.layout.num_chunks))
    source.cancel(group_id)
    return Exported(exported.spec, exported.layout, chunks)


def begin_import(
    target: Instance, exported: Exported, on_kv: Callable[[KvBlock], None] | None = None, **changes: Any
) -> PrefillImport:
    """An import that has its pages, and takes the export's chunks. ``changes`` of the group."""
    has_pages: list[bool] = []
    group = replace(exported.spec, **changes)
    prefill_import = target.import_prefill(group, on_kv, lambda: has_pages.append(True))
    assert has_pages == [True]
    layout = prefill_import.receive(exported.layout.shape.num_layers, exported.layout.block_tokens)
    assert layout == exported.layout
    return prefill_import


def import_prefill(
    target: Instance,
    exported: Exported,
    on_kv: Callable[[KvBlock], None] | None = None,
    order: int = 1,
    **changes: Any,
) -> None:
    prefill_import = begin_import(target, exported, on_kv, **changes)
    for index in list(range(exported.layout.num_chunks))[::order]:
        prefill_import.write(index, exported.chunks[index])
    assert prefill_import.num_missing == 0
    prefill_import.start()

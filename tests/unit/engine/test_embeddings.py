"""Embeddings of decoders: the hidden state of the last token, compared with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_headless
from tests.unit.engine.harness import Model, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.common.errors import ContextLengthExceeded, InvalidRequest
from torchrelay.engine.core import Embedding, GroupSpec, Pooling, SamplingParams, StepResult
from torchrelay.engine.instance import Instance

# Matrix products of other sizes add in another order. The hidden states have lengths of about 8.
ROUNDING = 1e-5


def embedded(prompt: Sequence[int], group_id: str = "r/0", **changes: Any) -> GroupSpec:
    group = group_of(prompt, group_id, SamplingParams(max_tokens=0))
    return replace(group, pooling=Pooling.LAST_TOKEN, **changes)


def embeddings(steps: Sequence[StepResult]) -> dict[str, Embedding]:
    given = [embedding for step in steps for embedding in step.embeddings]
    assert len({embedding.group_id for embedding in given}) == len(given)
    return {embedding.group_id: embedding for embedding in given}


def vector(embedding: Embedding) -> torch.Tensor:
    return torch.frombuffer(bytearray(embedding.values), dtype=torch.float32)


@torch.no_grad()
def reference(model: Model, prompt: Sequence[int]) -> torch.Tensor:
    """The last hidden state of transformers, which its final norm has been applied to."""
    states: torch.Tensor = model.reference.model(torch.tensor([list(prompt)])).last_hidden_state
    return states[0, -1].float()


def embed(instance: Instance, prompt: Sequence[int]) -> Embedding:
    instance.prefill(embedded(prompt))
    return embeddings(run(instance))["r/0"]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("length", [1, 30, 512])
def test_embedding_is_the_last_hidden_state(model_of: ModelOf, family: str, length: int) -> None:
    """A prompt may fill the whole context: no token follows it."""
    model = model_of(family)
    instance = model.instance(token_budget=64)
    given = vector(embed(instance, prompt_of(length)))
    assert float((given - reference(model, prompt_of(length))).abs().max()) < 2e-4
    assert_idle(instance)


@pytest.mark.parametrize("token_budget", [16, 48, 512])
def test_batches_chunks_and_cached_prefixes_change_only_the_rounding(model_of: ModelOf, token_budget: int) -> None:
    model = model_of("qwen3")
    prompts = {f"r/{salt}": (*prompt_of(40), *prompt_of(3 + 11 * salt, salt)) for salt in range(6)}
    alone = {}
    for group_id, prompt in prompts.items():
        alone[group_id] = vector(embed(model.instance(token_budget=512), prompt))
    instance = model.instance(token_budget=token_budget)
    instance.prefill(group_of(prompt_of(25), "decodes", SamplingParams(temperature=0, max_tokens=20)))
    for group_id, prompt in prompts.items():
        instance.prefill(embedded(prompt, group_id))
    steps = run(instance)
    assert outputs(steps)["decodes", 0] == model.expected(prompt_of(25), 20)
    for group_id, embedding in embeddings(steps).items():
        assert float((vector(embedding) - alone[group_id]).abs().max()) < ROUNDING
    again = embed(instance, prompts["r/3"])
    assert again.num_cached >= 32
    assert float((vector(again) - alone["r/3"]).abs().max()) < ROUNDING
    assert_idle(instance)


def test_embedding_while_the_model_loads(model_of: ModelOf) -> None:
    """Layer by layer as they arrive."""
    model = model_of("qwen3")
    instance = model.instance(loaded=False)
    instance.prefill(embedded(prompt_of(30)))
    steps: list[StepResult] = []
    for segment in range(len(model.pack.manifest.segments)):
        instance.segment_ready(segment)
        steps += run(instance)
    given = vector(embeddings(steps)["r/0"])
    assert float((given - reference(model, prompt_of(30))).abs().max()) < 2e-4
    assert_idle(instance)


def test_prefill_alone_counts(model_of: ModelOf) -> None:
    instance = model_of("qwen3").instance()
    instance.prefill(embedded(prompt_of(30)))
    (step,) = run(instance)
    assert step.prefilled == ("r/0",) and step.num_positions_prefilled == 30 and not step.tokens


def test_overflow_is_an_embedding_without_values(model_of: ModelOf) -> None:
    instance = model_of("qwen3").instance()
    norm = instance.model.weights.final_norm
    instance.model.weights.final_norm = lambda: norm() * torch.inf  # type: ignore[method-assign]
    assert embed(instance, prompt_of(5)).values == b""


def test_cancelled_embedding_frees_its_pages(model_of: ModelOf) -> None:
    instance = model_of("qwen3").instance(token_budget=16)
    instance.prefill(embedded(prompt_of(60)))
    assert not instance.step().embeddings
    instance.cancel("r/0")
    assert not embeddings(run(instance))
    assert_idle(instance)


def test_model_without_a_head_gives_embeddings_alone(model_of: ModelOf, tmp_path: Path) -> None:
    whole = model_of("qwen3")
    instance = Model(make_headless(shutil.copytree(whole.folder, tmp_path / "headless"))).instance()
    given = vector(embed(instance, prompt_of(30)))
    assert float((given - reference(whole, prompt_of(30))).abs().max()) < 2e-4
    with pytest.raises(InvalidRequest, match="no head"):
        instance.prefill(group_of(prompt_of(30)))
    assert_idle(instance)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        (embedded(prompt_of(513)), ContextLengthExceeded),
        (embedded(()), InvalidRequest),
        (replace(group_of(prompt_of(5), forced=[(), ()]), pooling=Pooling.LAST_TOKEN), InvalidRequest),
        (replace(group_of(prompt_of(5), forced=[(1,)]), pooling=Pooling.LAST_TOKEN), InvalidRequest),
    ],
)
def test_invalid_embedding_is_refused(model_of: ModelOf, group: GroupSpec, error: type[Exception]) -> None:
    instance = model_of("qwen3").instance()
    with pytest.raises(error):
        instance.prefill(group)
    assert_idle(instance)

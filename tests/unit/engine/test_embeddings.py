"""Embeddings of decoders, by their last token, and of encoders, compared with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import ENCODERS, encoder_states, make_encoder, make_headless
from tests.unit.engine.harness import Model, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.common.errors import Conflict, ContextLengthExceeded, InvalidRequest
from torchrelay.engine.core import Embedding, GroupSpec, Pooling, SamplingParams, StepResult
from torchrelay.engine.instance import Instance

EncoderOf = Callable[..., Model]
ROUNDING = 1e-5  # products of other sizes add in another order; the hidden states have lengths of about 8
LAST, MEAN, FIRST = Pooling.LAST_TOKEN, Pooling.MEAN, Pooling.FIRST_TOKEN


@pytest.fixture(scope="module")
def encoder_of(tmp_path_factory: pytest.TempPathFactory) -> EncoderOf:
    @cache
    def made(name: str = "BertModel", dtype: str = "float32") -> Model:
        return Model(make_encoder(tmp_path_factory.mktemp(name), name, dtype))

    return made


def words_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt in the vocabulary of an encoder."""
    return tuple(token % 128 for token in prompt_of(length, salt))


def embedded(prompt: Sequence[int], group_id: str = "r/0", pooling: Pooling = LAST) -> GroupSpec:
    return replace(group_of(prompt, group_id, SamplingParams(max_tokens=0)), pooling=pooling)


def embeddings(steps: Sequence[StepResult]) -> dict[str, Embedding]:
    given = [embedding for step in steps for embedding in step.embeddings]
    assert len({embedding.group_id for embedding in given}) == len(given)
    return {embedding.group_id: embedding for embedding in given}


def vector(embedding: Embedding) -> torch.Tensor:
    return torch.frombuffer(bytearray(embedding.values), dtype=torch.float32)


def distance(given: Embedding, expected: torch.Tensor) -> float:
    return float((vector(given) - expected).abs().max())


@torch.no_grad()
def reference(model: Model, prompt: Sequence[int]) -> torch.Tensor:
    """The last hidden state of transformers, which its final norm has been applied to."""
    states: torch.Tensor = model.reference.model(torch.tensor([list(prompt)])).last_hidden_state
    return states[0, -1].float()


def mean_of(model: Model, prompt: Sequence[int]) -> torch.Tensor:
    return encoder_states(model.folder, prompt).mean(0)


def embed(instance: Instance, prompt: Sequence[int], pooling: Pooling = LAST) -> Embedding:
    instance.prefill(embedded(prompt, pooling=pooling))
    return embeddings(run(instance))["r/0"]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("length", [1, 30, 512])
def test_embedding_is_the_last_hidden_state(model_of: ModelOf, family: str, length: int) -> None:
    """A prompt may fill the whole context: no token follows it."""
    model = model_of(family)
    instance = model.instance(token_budget=64)
    assert distance(embed(instance, prompt_of(length)), reference(model, prompt_of(length))) < 2e-4
    assert_idle(instance)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("length", [1, 40, 98])
def test_poolings_are_those_of_transformers(encoder_of: EncoderOf, name: str, length: int) -> None:
    """A prompt may fill all positions, of which RoBERTa leaves two unused."""
    model, prompt = encoder_of(name), words_of(length)
    instance, states = model.instance(token_budget=16), encoder_states(model.folder, prompt)
    for pooling, expected in ((MEAN, states.mean(0)), (FIRST, states[0])):
        assert distance(embed(instance, prompt, pooling), expected) < ROUNDING
        assert_idle(instance)


def test_padding_within_a_text_has_the_position_of_padding(encoder_of: EncoderOf) -> None:
    model, prompt = encoder_of("RobertaModel"), (1, *words_of(10), 1, 1, *words_of(5))
    assert distance(embed(model.instance(), prompt, MEAN), mean_of(model, prompt)) < ROUNDING


def test_16_bit_weights_of_an_encoder(encoder_of: EncoderOf) -> None:
    model = encoder_of("BertModel", "bfloat16")
    assert distance(embed(model.instance(cpu_reorder=True), words_of(40), MEAN), mean_of(model, words_of(40))) < 0.05


@pytest.mark.parametrize("token_budget", [16, 48, 512])
def test_batches_chunks_and_cached_prefixes_change_only_the_rounding(model_of: ModelOf, token_budget: int) -> None:
    model = model_of("qwen3")
    prompts = {f"r/{salt}": (*prompt_of(40), *prompt_of(3 + 11 * salt, salt)) for salt in range(6)}
    alone = {name: vector(embed(model.instance(token_budget=512), prompt)) for name, prompt in prompts.items()}
    instance = model.instance(token_budget=token_budget)
    instance.prefill(group_of(prompt_of(25), "decodes", SamplingParams(temperature=0, max_tokens=20)))
    for group_id, prompt in prompts.items():
        instance.prefill(embedded(prompt, group_id))
    steps = run(instance)
    assert outputs(steps)["decodes", 0] == model.expected(prompt_of(25), 20)
    for group_id, embedding in embeddings(steps).items():
        assert distance(embedding, alone[group_id]) < ROUNDING
    again = embed(instance, prompts["r/3"])
    assert again.num_cached >= 32 and distance(again, alone["r/3"]) < ROUNDING
    assert_idle(instance)


def test_prompts_of_an_encoder_are_computed_whole(encoder_of: EncoderOf) -> None:
    """As many at once as fit into the budget."""
    model = encoder_of()
    instance = model.instance(token_budget=16)
    prompts = {f"r/{salt}": words_of(1 + 9 * salt, salt) for salt in range(8)}
    for group_id, prompt in prompts.items():
        instance.prefill(embedded(prompt, group_id, MEAN))
    steps = run(instance)
    assert [step.num_positions_prefilled for step in steps] == [1 + 10 + 19 + 28 + 37, 46, 55, 64]
    assert not any(step.prompts for step in steps), "no prompt is divided"
    for group_id, embedding in embeddings(steps).items():
        assert not embedding.num_cached and distance(embedding, mean_of(model, prompts[group_id])) < ROUNDING
    assert_idle(instance)


@pytest.mark.parametrize("is_encoder", [False, True])
def test_embedding_while_the_model_loads(model_of: ModelOf, encoder_of: EncoderOf, is_encoder: bool) -> None:
    """Layer by layer as they arrive."""
    model = encoder_of() if is_encoder else model_of("qwen3")
    instance = model.instance(loaded=False, token_budget=16 if is_encoder else 512)
    for group_id, length in (("r/0", 90), ("r/1", 30)):
        instance.prefill(embedded(words_of(length), group_id, MEAN if is_encoder else LAST))
    steps: list[StepResult] = []
    for segment in range(len(model.pack.manifest.segments)):
        instance.segment_ready(segment)
        steps += run(instance)
    assert any(step.ran_one_layer for step in steps)
    for group_id, length in (("r/0", 90), ("r/1", 30)):
        expected = (mean_of if is_encoder else reference)(model, words_of(length))
        assert distance(embeddings(steps)[group_id], expected) < (ROUNDING if is_encoder else 2e-4)
    assert_idle(instance)


def test_begun_prompt_of_an_encoder_is_not_exported(encoder_of: EncoderOf) -> None:
    instance = encoder_of().instance(loaded=False)
    instance.prefill(embedded(words_of(30), pooling=MEAN))
    for segment in (0, 1):
        instance.segment_ready(segment)
    assert run(instance)
    with pytest.raises(Conflict):
        instance.export_prefill("r/0")
    instance.cancel("r/0")
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
    assert distance(embed(instance, prompt_of(30)), reference(whole, prompt_of(30))) < 2e-4
    with pytest.raises(InvalidRequest, match="no head"):
        instance.prefill(group_of(prompt_of(30)))
    assert_idle(instance)


@pytest.mark.parametrize(
    ("is_encoder", "group", "error"),
    [
        (False, embedded(prompt_of(513)), ContextLengthExceeded),
        (False, embedded(()), InvalidRequest),
        (False, replace(group_of(prompt_of(5), forced=[(), ()]), pooling=LAST), InvalidRequest),
        (False, replace(group_of(prompt_of(5), forced=[(1,)]), pooling=LAST), InvalidRequest),
        (True, embedded(words_of(101), pooling=MEAN), ContextLengthExceeded),
        (True, embedded((128,), pooling=MEAN), InvalidRequest),
        (True, embedded(words_of(5)), InvalidRequest),
        (True, group_of(words_of(5)), InvalidRequest),
    ],
)
def test_invalid_embedding_is_refused(
    model_of: ModelOf, encoder_of: EncoderOf, is_encoder: bool, group: GroupSpec, error: type[Exception]
) -> None:
    instance = encoder_of().instance() if is_encoder else model_of("qwen3").instance()
    with pytest.raises(error):
        instance.prefill(group)
    assert_idle(instance)

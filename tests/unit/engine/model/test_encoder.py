"""Embeddings of encoders, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.support.checkpoints import ENCODERS, encoder_states, make_encoder
from tests.unit.engine.harness import Model, assert_idle, group_of, prompt_of, run
from torchrelay.common.errors import Conflict, ContextLengthExceeded, InvalidRequest
from torchrelay.engine.core import GroupSpec, Pooling, SamplingParams, StepResult

EncoderOf = Callable[..., Model]
ROUNDING = 1e-5  # the hidden states have lengths of about 8


@pytest.fixture(scope="module")
def encoder_of(tmp_path_factory: pytest.TempPathFactory) -> EncoderOf:
    @cache
    def made(name: str, dtype: str = "float32") -> Model:
        return Model(make_encoder(tmp_path_factory.mktemp(name), name, dtype))

    return made


def tokens_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(token % 128 for token in prompt_of(length, salt))


def embedded(prompt: Sequence[int], group_id: str = "r/0", pooling: Pooling = Pooling.MEAN) -> GroupSpec:
    return replace(group_of(prompt, group_id, SamplingParams(max_tokens=0)), pooling=pooling)


def vectors(steps: Sequence[StepResult]) -> dict[str, torch.Tensor]:
    given = [embedding for step in steps for embedding in step.embeddings]
    assert not any(embedding.num_cached for embedding in given)
    return {each.group_id: torch.frombuffer(bytearray(each.values), dtype=torch.float32) for each in given}


def distance(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).abs().max())


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("length", [1, 40, 98])
def test_poolings_are_those_of_transformers(encoder_of: EncoderOf, name: str, length: int) -> None:
    """A prompt may fill all positions, of which RoBERTa leaves two unused."""
    model = encoder_of(name)
    instance = model.instance(token_budget=16)
    prompt = tokens_of(length)
    states = encoder_states(model.folder, prompt)
    for pooling, expected in ((Pooling.MEAN, states.mean(0)), (Pooling.FIRST_TOKEN, states[0])):
        instance.prefill(embedded(prompt, pooling=pooling))
        assert distance(vectors(run(instance))["r/0"], expected) < ROUNDING
        assert_idle(instance)


def test_padding_within_a_text_has_the_position_of_padding(encoder_of: EncoderOf) -> None:
    model = encoder_of("RobertaModel")
    instance = model.instance()
    prompt = (1, *tokens_of(10), 1, 1, *tokens_of(5))
    instance.prefill(embedded(prompt))
    assert distance(vectors(run(instance))["r/0"], encoder_states(model.folder, prompt).mean(0)) < ROUNDING


def test_16_bit_weights(encoder_of: EncoderOf) -> None:
    model = encoder_of("BertModel", "bfloat16")
    instance = model.instance(cpu_reorder=True)
    instance.prefill(embedded(tokens_of(40)))
    expected = encoder_states(model.folder, tokens_of(40)).mean(0)
    assert distance(vectors(run(instance))["r/0"], expected) < 0.05


def test_batches_change_only_the_rounding(encoder_of: EncoderOf) -> None:
    """Prompts are computed whole, as many at once as fit into the budget."""
    model = encoder_of("BertModel")
    instance = model.instance(token_budget=16)
    prompts = {f"r/{salt}": tokens_of(1 + 9 * salt, salt) for salt in range(8)}
    for group_id, prompt in prompts.items():
        instance.prefill(embedded(prompt, group_id))
    steps = run(instance)
    assert [step.num_positions_prefilled for step in steps] == [1 + 10 + 19 + 28 + 37, 46, 55, 64]
    assert not any(step.prompts for step in steps), "no prompt is divided"
    for group_id, vector in vectors(steps).items():
        assert distance(vector, encoder_states(model.folder, prompts[group_id]).mean(0)) < ROUNDING
    assert_idle(instance)


def test_embedding_while_the_model_loads(encoder_of: EncoderOf) -> None:
    """Layer by layer as they arrive."""
    model = encoder_of("BertModel")
    instance = model.instance(loaded=False, token_budget=16)
    instance.prefill(embedded(tokens_of(90)))
    instance.prefill(embedded(tokens_of(30), "r/1"))
    steps: list[StepResult] = []
    for segment in range(len(model.pack.manifest.segments)):
        instance.segment_ready(segment)
        steps += run(instance)
    assert any(step.ran_one_layer for step in steps)
    for group_id, length in (("r/0", 90), ("r/1", 30)):
        expected = encoder_states(model.folder, tokens_of(length)).mean(0)
        assert distance(vectors(steps)[group_id], expected) < ROUNDING
    assert_idle(instance)


def test_prompt_that_has_begun_is_not_exported(encoder_of: EncoderOf) -> None:
    instance = encoder_of("BertModel").instance(loaded=False)
    instance.prefill(embedded(tokens_of(30)))
    for segment in (0, 1):
        instance.segment_ready(segment)
    assert run(instance)
    with pytest.raises(Conflict):
        instance.export_prefill("r/0")
    instance.cancel("r/0")
    assert_idle(instance)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        (embedded(tokens_of(101)), ContextLengthExceeded),
        (embedded((128,)), InvalidRequest),
        (embedded(tokens_of(5), pooling=Pooling.LAST_TOKEN), InvalidRequest),
        (group_of(tokens_of(5)), InvalidRequest),
    ],
)
def test_invalid_group_is_refused(encoder_of: EncoderOf, group: GroupSpec, error: type[Exception]) -> None:
    instance = encoder_of("BertModel").instance()
    with pytest.raises(error):
        instance.prefill(group)
    assert_idle(instance)

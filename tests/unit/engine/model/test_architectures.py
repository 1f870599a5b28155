"""Each switch of an architecture matters: without it the same model no longer gives transformers' logits and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.engine.harness import Model, ModelOf, group_of, last_logits, outputs, prompt_of, run
from torchrelay.engine.model.rope import Rope, rotate
from torchrelay.modelspec.config import ExpertConfig, ModelConfig, Multipliers, RopeConfig, read_config

PROMPTS = [prompt_of(70, salt) for salt in range(3)]
Change = Callable[[ModelConfig], ModelConfig]


def switched(**switches: Any) -> Change:
    return lambda config: replace(config, architecture=replace(config.architecture, **switches))


def with_numbers(**numbers: Any) -> Change:
    return lambda config: replace(config, **numbers)


def no_window(config: ModelConfig) -> ModelConfig:
    """Windows beyond every prompt: the layers stay of two kinds."""
    return replace(config, windows=tuple(None if window is None else 10_000 for window in config.windows))


def without_rope_scaling(config: ModelConfig) -> ModelConfig:
    assert config.rope is not None
    return replace(config, rope=RopeConfig(config.rope.theta))


def rope_with(**numbers: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.rope is not None
        return replace(config, rope=replace(config.rope, **numbers))

    return change


def experts_with(**numbers: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.experts, ExpertConfig)
        return replace(config, experts=replace(config.experts, **numbers))

    return change


def without_shared_expert(config: ModelConfig) -> ModelConfig:
    names = config.architecture.experts
    assert names is not None
    return switched(experts=replace(names, shared=""))(config)


UNCAPPED_LOGITS = with_numbers(logit_cap=None)  # a cap keeps their order, and so the greedy tokens


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama3-rope", without_rope_scaling),
        ("llama-bias", with_numbers(attention_bias=False)),
        ("llama-bias", with_numbers(mlp_bias=False)),
        ("qwen3-bias", with_numbers(attention_bias=False)),
        ("granite", with_numbers(multipliers=Multipliers(1.0, 0.4, 2.0))),
        ("granite", with_numbers(multipliers=Multipliers(3.0, 1.0, 2.0))),
        ("granite", with_numbers(query_scale=0.25)),
        ("yarn-rope", without_rope_scaling),
        ("phi3-long-rope", rope_with(short_factors=())),
        ("phi3-long-rope", rope_with(attention_factor=1.0)),
        ("phi3-long-rope", rope_with(rotated_share=1.0, short_factors=())),
        ("smollm3", with_numbers(unrotated_layers=frozenset())),
        ("smollm3-window", no_window),
        ("mistral", no_window),
        ("qwen2", switched(qkv_bias=False)),
        ("qwen2-window", no_window),
        ("qwen3", switched(qk_norm=False)),
        ("gemma2", no_window),
        ("gemma2", switched(unit_offset_norms=False)),
        ("gemma2", switched(scaled_embeddings=False)),
        ("gemma2", switched(sandwich_norms=False)),
        ("gemma2", with_numbers(score_cap=None)),
        ("gemma2", UNCAPPED_LOGITS),
        ("gemma2", with_numbers(query_scale=24**-0.5)),
        ("gemma2", with_numbers(activation="silu")),
        ("gemma3", no_window),
        ("gemma3", switched(qk_norm=False)),
        ("gemma3", with_numbers(local_rope=None)),
        ("gemma3", without_rope_scaling),
        ("phi3", no_window),
        ("mixtral", experts_with(per_token=1)),
        ("mixtral", experts_with(norm_topk_prob=False)),
        ("qwen3-moe", experts_with(per_token=2)),
        ("qwen2-moe", experts_with(per_token=2)),
        ("qwen2-moe", without_shared_expert),
        ("olmo2", switched(wide_qk_norm=False)),
        ("olmo2", switched(sandwich_norms=False)),
    ],
)
def test_each_switch_changes_logits(model_of: ModelOf, family: str, change: Change) -> None:
    model, prompt = model_of(family), prompt_of(70)
    expected = model.logits(prompt)[0]
    assert float((last_logits(model.instance(), prompt) - expected).abs().max()) < 1e-4
    expected_tokens = [model.expected(prompt) for prompt in PROMPTS]
    assert tokens(model) == expected_tokens
    changed = change(read_config(model.pack.manifest.config))
    assert float((last_logits(model.instance(config=changed), prompt) - expected).abs().max()) > 1e-2
    assert (tokens(model, config=changed) == expected_tokens) is (change is UNCAPPED_LOGITS)


def tokens(model: Model, config: ModelConfig | None = None) -> list[list[int]]:
    """Greedy continuations of the prompts, all in one batch."""
    instance = model.instance(config=config)
    for number, prompt in enumerate(PROMPTS):
        instance.prefill(group_of(prompt, f"{number}/0"))
    actual = outputs(run(instance))
    return [actual[f"{number}/0", 0] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "yarn-rope", "phi3-long-rope"])
def test_angles_equal_transformers(model_of: ModelOf, family: str) -> None:
    model = model_of(family)
    config = model.instance().config
    assert config.rope is not None
    rope = Rope(config.rope, config.head_dim, torch.device("cpu"))
    positions = torch.arange(0, config.max_context_tokens, 7)
    expected_cos, expected_sin = model.reference.model.rotary_emb(torch.zeros(1), positions[None])
    cos, sin = rope.angles(positions, torch.float32)
    half = cos.shape[-1]
    assert torch.allclose(cos[:, 0], expected_cos[0, :, :half], atol=1e-6)
    assert torch.allclose(sin[:, 0], expected_sin[0, :, :half], atol=1e-6)


def test_rotation_keeps_lengths_and_relative_distance() -> None:
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    angles = torch.tensor([0.3, 0.1, 0.03, 0.01], dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, (position * angles).cos(), (position * angles).sin())

    assert torch.allclose(at(query, 9).norm(), query.norm())
    assert torch.allclose((at(query, 9) * at(key, 4)).sum(), (at(query, 25) * at(key, 20)).sum())

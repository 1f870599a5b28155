from __future__ import annotations

import pytest
import torch

from tests.unit.engine.harness import ModelOf
from torchrelay.engine.model.rope import Rope, rotate


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

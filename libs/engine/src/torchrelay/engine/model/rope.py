"""Rotary position embedding: default, linearly scaled, and with Llama 3's scaling of the frequencies.

Angles are computed per batch, a few thousand cosines. A table for the whole context would be built at every cold start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrelay.modelspec.config import RopeConfig, RopeScaling


class Rope:
    """The rotation of one kind of layer; ``inverse_frequencies`` is fp32 [head_dim / 2]."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (config.theta**exponents) / config.linear_factor
        if config.scaling is not None:
            frequencies = _scaled(frequencies, config.scaling)
        self.inverse_frequencies = frequencies.to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [tokens, 1, head_dim / 2], computed in fp32 and rounded to ``dtype``."""
        angles = positions[:, None, None].float() * self.inverse_frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [tokens, heads, head_dim]; its halves are the two coordinates of each plane."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scales long wavelengths by ``factor``, keeps short ones, and interpolates between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    stretched = frequencies / scaling.factor
    blended = (1 - blend) * stretched + blend * frequencies
    is_long = wavelengths > scaling.original_max_position / scaling.low_freq_factor
    is_short = wavelengths < scaling.original_max_position / scaling.high_freq_factor
    return torch.where(is_long, stretched, torch.where(is_short, frequencies, blended))

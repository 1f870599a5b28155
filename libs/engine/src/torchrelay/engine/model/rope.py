"""Rotary position embedding: default, or with frequencies scaled linearly or as by Llama 3, YaRN or LongRoPE.

Angles are computed per batch, a few thousand cosines. A table for the whole context would be built at every cold start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrelay.modelspec.config import RopeConfig, RopeScaling, YarnScaling


class Rope:
    """The rotation of one kind of layer; ``inverse_frequencies`` is fp32, half as long as what is rotated of a head."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        size = int(head_dim * config.rotated_share)
        stretched = config.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        if config.short_factors:
            stretched = torch.tensor(config.short_factors) * stretched
        frequencies = 1.0 / stretched / config.linear_factor
        if isinstance(config.scaling, YarnScaling):
            frequencies = _ramped(frequencies, config.scaling, config.theta)
        elif config.scaling is not None:
            frequencies = _scaled(frequencies, config.scaling)
        self.inverse_frequencies = frequencies.to(device)
        self._factor = config.attention_factor

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [tokens, 1, frequencies], computed in fp32 and rounded to ``dtype``."""
        angles = positions[:, None, None].float() * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return cos.to(dtype), sin.to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [tokens, heads, head_dim]: its first numbers, twice as many as cosines. The halves of what is rotated are
    the two coordinates of each plane.
    """
    size = cos.shape[-1]
    first, second, rest = heads[..., :size], heads[..., size : 2 * size], heads[..., 2 * size :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _ramped(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Blends frequencies with those divided by ``factor``, from plane to plane (Peng et al., 2023)."""
    size = 2 * len(frequencies)

    def plane(num_turns: float) -> float:
        """The plane that turns so often within the original context."""
        return size * math.log(scaling.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = plane(scaling.beta_fast), plane(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


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

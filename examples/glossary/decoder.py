"""A Llama decoder in plain torch, for training and running a small model on a CPU.

The modules carry the names of a Hugging Face checkpoint, so ``state_dict()`` is what ``model.safetensors`` holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape parameters of a Llama ``config.json``; embeddings are tied."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_context_tokens: int = 1024

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> DecoderConfig:
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
            max_context_tokens=config["max_position_embeddings"],
        )


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values and rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = _rotate(self._heads(self.q_proj(x)), cos, sin)
        k = _rotate(self._heads(self.k_proj(x)), cos, sin)
        v = self._heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        return x.view(rows, length, -1, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> Tensor:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Trunk(nn.Module):
    """Everything but the head; a checkpoint calls it ``model``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class Decoder(nn.Module):
    """Token ids [rows, length] to hidden states, and hidden states to logits through the tied embeddings."""

    def __init__(self, config: DecoderConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.model = Trunk(config)
        self.apply(_initialise)

    def hidden(self, token_ids: Tensor) -> Tensor:
        """[rows, length] int64 -> [rows, length, hidden_size], normalised."""
        cos, sin = _rotary(self.config, token_ids.shape[1])
        x = F.dropout(self.model.embed_tokens(token_ids), self.dropout, self.training)
        for layer in self.model.layers:
            x = layer(x, cos, sin, self.dropout)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., vocab_size]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    @torch.no_grad()
    def greedy(self, prompt: list[int], stop_id: int, max_tokens: int = 128) -> list[int]:
        """The greedy continuation of ``prompt``, without ``stop_id``. Recomputes the whole text for each token."""
        token_ids = list(prompt)
        while len(token_ids) - len(prompt) < max_tokens:
            hidden = self.hidden(torch.tensor([token_ids]))
            chosen = int(self.logits(hidden[0, -1]).argmax())
            if chosen == stop_id:
                break
            token_ids.append(chosen)
        return token_ids[len(prompt) :]


def load_decoder(folder: Path) -> Decoder:
    """The model of a Hugging Face folder with a tied Llama checkpoint in one file."""
    config = DecoderConfig.from_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    decoder = Decoder(config)
    decoder.load_state_dict(load_file(folder / "model.safetensors"))
    return decoder.eval()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.04)


def _rotary(config: DecoderConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim], in the half-and-half order of Hugging Face checkpoints."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

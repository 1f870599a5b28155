"""The sizes of a run: the full one, a quick one, and a dry one for Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from bench.device.packs import LLAMA_8B
from torchrelay.engine.execution.decode_graphs import BATCH_SIZES

Config = dict[str, Any]


@dataclass(frozen=True)
class HeadShape:
    """The attention of a family of models."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cap: float | None = None
    window: int | None = None
    qk_norm: bool = False


HEADS: Final = {
    "llama_8b": HeadShape(32, 8, 128),
    "qwen3": HeadShape(32, 8, 128, qk_norm=True),
    "gemma2": HeadShape(16, 8, 256, cap=50.0, window=4096),
    "28_over_4": HeadShape(28, 4, 128),
}
SMALL_HEADS: Final = {"tiny": HeadShape(2, 1, 16, cap=50.0, window=20, qk_norm=True)}


@dataclass(frozen=True)
class Sizes:
    """The full sizes, unless replaced."""

    config: Config = field(default_factory=lambda: LLAMA_8B)  # of the model whose speed is measured, bf16
    # The same with fewer layers, for copies and for kinds of steps.
    layered_config: Config = field(default_factory=lambda: LLAMA_8B | {"num_hidden_layers": 8})
    # Of the model whose tokens are compared, fp32.
    exact_config: Config = field(default_factory=lambda: LLAMA_8B | {"num_hidden_layers": 4, "vocab_size": 32_000})
    heads: dict[str, HeadShape] = field(default_factory=lambda: HEADS)
    hidden: int = 4096  # of norms and gates
    contexts: tuple[int, ...] = (1, 15, 16, 17, 4095, 32_768)  # of single sequences in attention
    families: tuple[str, ...] = ("llama", "llama3-rope", "qwen3", "mistral", "gemma2", "gemma3")
    family_config: Config = field(default_factory=dict)  # that replaces numbers of the families'
    lengths: tuple[int, ...] = (1, 15, 17, 70, 300)  # of prompts
    token_batches: tuple[int, ...] = (1, 5, 8, 17, 256)
    num_tokens: int = 24
    limit_bytes: int = 4 * 10**9  # of copies and reads that show the device's limits
    num_copies: int = 10
    arrival_bytes_per_s: float = 2e9
    num_loads: int = 20
    batches: tuple[int, ...] = (1, 8, 32, 128)
    num_prompt_tokens: int = 512
    num_steps: int = 64
    num_prefill_tokens: int = 8192
    num_prefills: int = 4
    token_budgets: tuple[int, ...] = (512, 2048, 8192)  # the last one is that of the decode steps
    matrix: int = 8192
    peer_batches: tuple[int, ...] = (1, 32)
    recorded: tuple[int, ...] = BATCH_SIZES
    num_short_tokens: int = 16  # of prompts where contexts do not matter
    num_sampled: int = 64  # rows
    num_beside_adapter: int = 32  # rows
    num_handed_over: int = 4096  # tokens
    num_streams: int = 16  # beside a hand-over
    num_soak_streams: int = 64
    soak_s: float = 180.0
    num_soak_checks: int = 3


FULL: Final = Sizes()
QUICK: Final = replace(
    FULL,
    config=FULL.layered_config,
    heads={name: HEADS[name] for name in ("llama_8b", "gemma2")},
    families=("llama", "gemma2"),
    lengths=(1, 17, 150),
    token_batches=(1, 17),
    limit_bytes=2 * 10**9,
    num_copies=3,
    batches=(1, 32),
    num_prompt_tokens=128,
    num_steps=32,
    num_prefill_tokens=4096,
    token_budgets=(8192,),
    peer_batches=(1,),
)
_TINY = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
_TINY |= {"num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 512}
DRY: Final = Sizes(
    config=_TINY,
    layered_config=_TINY,
    exact_config=_TINY | {"num_hidden_layers": 2},
    heads=SMALL_HEADS,
    hidden=96,
    contexts=(1, 16, 17, 40),
    families=("llama",),
    family_config={"num_hidden_layers": 1, "num_attention_heads": 2},
    lengths=(1, 5),
    token_batches=(1,),
    num_tokens=3,
    limit_bytes=1 << 20,
    num_copies=2,
    arrival_bytes_per_s=1e6,
    num_loads=2,
    batches=(1, 2),
    num_prompt_tokens=3,
    num_steps=1,
    num_prefill_tokens=4,
    num_prefills=1,
    token_budgets=(16, 32),
    matrix=64,
    peer_batches=(1,),
    recorded=(1, 2),
    num_short_tokens=2,
    num_sampled=1,
    num_beside_adapter=1,
    num_handed_over=40,
    num_streams=2,
    num_soak_streams=4,
    soak_s=1.0,
    num_soak_checks=2,
)

"""The two checkpoints that `engine.py` measures, and the bytes that a step must read of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from bench.cold_start import MID, SMALL
from bench.random_checkpoint import EMBEDDING, HEAD, llama_tensors

LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
CONTEXT_TOKENS: Final = 2048
NUM_BYTES_ALONE: Final = 256  # the first tokens are single bytes, many of which are not text
_random = torch.Generator().manual_seed(0)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A checkpoint; decoding one token alone reads ``step_bytes`` of weights."""

    name: str
    folder: Path
    vocab_size: int
    step_bytes: int


def make_models(root: Path, mid_layers: int) -> list[BenchModel]:
    """Makes the tiny model in fp32 and the mid model, with ``mid_layers``, in bf16."""
    mid = {**MID, "num_hidden_layers": mid_layers}
    return [_make(root, "tiny", torch.float32, SMALL), _make(root, "mid", torch.bfloat16, mid)]


def _make(root: Path, name: str, dtype: torch.dtype, config: dict[str, Any]) -> BenchModel:
    config = {**config, "max_position_embeddings": CONTEXT_TOKENS}
    folder = root / name
    folder.mkdir()
    tensors = {key: _values(shape, dtype) for key, shape in llama_tensors(config).items()}
    # These tokens are never the most likely, so every token is text and its own event.
    tensors[HEAD][:NUM_BYTES_ALONE] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**LLAMA, **config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(settings))
    write_tokenizer(folder, config["vocab_size"])
    num_bytes = sum(tensor.numel() * tensor.element_size() for key, tensor in tensors.items() if key != EMBEDDING)
    return BenchModel(name, folder, config["vocab_size"], num_bytes)


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random weights, scaled to preserve the size of hidden states."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(std=shape[-1] ** -0.5, generator=_random)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a byte-level BPE tokenizer: single bytes, then words of two and three letters."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(first, second) for first in letters for second in letters]
    merges += [(first + second, third) for first, second in merges.copy() for third in letters]
    del merges[vocab_size - len(vocab) :]
    vocab |= {left + right: len(vocab) + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))

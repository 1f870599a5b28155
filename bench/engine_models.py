"""The two checkpoints that `engine.py` measures, and what one step of them must read."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from bench.cold_start import MID, SMALL
from tests.support.checkpoints import make_checkpoint

CONTEXT_TOKENS: Final = 2048
NUM_BYTES_ALONE: Final = 256  # the first tokens are single bytes, and many of them are no text


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A checkpoint; ``step_bytes`` of weights are read for every token that is decoded alone."""

    name: str
    folder: Path
    vocab_size: int
    step_bytes: int


def make_models(root: Path) -> tuple[BenchModel, BenchModel]:
    """The tiny one in fp32 and the mid one in bf16."""
    return _make(root, "tiny", "float32", SMALL), _make(root, "mid", "bfloat16", MID)


def _make(root: Path, name: str, dtype: str, config: dict[str, Any]) -> BenchModel:
    config = {**config, "max_position_embeddings": CONTEXT_TOKENS}
    folder = make_checkpoint(root / name, "llama", dtype=dtype, **config)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    # Never the likeliest: so every token is text, and an event of its own.
    tensors["lm_head.weight"][:NUM_BYTES_ALONE] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])
    embedding = tensors["model.embed_tokens.weight"]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return BenchModel(name, folder, config["vocab_size"], num_bytes - embedding.numel() * embedding.element_size())


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE: single bytes, then words of two and three letters."""
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


def read_bytes_per_s(num_bytes: int, num_rounds: int = 8) -> float:
    """How fast all cores read memory: the quickest of several sums over as many bytes as a step's weights."""
    memory = torch.ones(num_bytes // 4096 * 512, dtype=torch.int64)
    matrix, vector = torch.ones(num_bytes // 4096, 1024), torch.ones(1024)
    best_s = float("inf")
    for _ in range(num_rounds):
        for read, operands in ((torch.sum, (memory,)), (torch.mv, (matrix, vector))):
            begin_s = time.perf_counter()
            read(*operands)
            best_s = min(best_s, time.perf_counter() - begin_s)
    return matrix.numel() * matrix.element_size() / best_s

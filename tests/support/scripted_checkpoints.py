"""Checkpoints whose model plays a script: each token leads to the next one of the script, or to the answer's end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import BOS, EOS, make_checkpoint

CONTEXT = 4096
SCRIPT_GAIN, END_PREFERENCE = 4.0, 2.0  # sampling at temperature 1 leaves the script once in millions of tokens


def make_scripted_checkpoint(folder: Path, script: Mapping[str, str], template: str, context: int = CONTEXT) -> Path:
    """Writes a checkpoint that continues the token ``key`` of the script with the token that is its value.

    Each key and value becomes one token. A value that is no key ends the answer, as every other token does. Under a
    mask the model prefers the script, then the end, then tokens without white space.
    """
    texts = list(dict.fromkeys([*script, *script.values()]))
    base = 256 + 3
    size = base + len(texts)
    hidden = -(-(size + 1) // 8) * 8  # a dimension for each token, and one that all share
    make_checkpoint(
        folder,
        "llama",
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        vocab_size=size,
        max_position_embeddings=context,
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "norm" in name:
            weight.fill_(1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    shared = size
    embedding, head = torch.zeros(size, hidden), torch.zeros(size, hidden)
    embedding[:, :size] = torch.eye(size)
    embedding[:, shared] = 1
    for text, continuation in script.items():
        head[tokenizer.token_to_id(continuation), tokenizer.token_to_id(text)] = SCRIPT_GAIN
    head[tokenizer.token_to_id(EOS), shared] = END_PREFERENCE
    for space in (*"ĠĊčĉ", BOS):
        head[tokenizer.token_to_id(space), shared] = -END_PREFERENCE
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding, head
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder

"""The conversion of a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay.cli.gguf.family import ROPE_FACTORS, config_of, family_of
from torchrelay.cli.gguf.header import GgufHeader, read_header
from torchrelay.cli.gguf.refusal import quoted, refusal
from torchrelay.cli.gguf.tokenizer import tokenizer_files
from torchrelay.cli.gguf.weights import BF16_BYTES, Weight, fp32_values, weights_of, write_weight


def convert(path: Path, folder: Path, progress: Callable[[str, int, int], None]) -> None:
    """Writes config.json, tokenizer, chat template and weights in bf16 into ``folder``.

    Raises ``CliError`` with the file and the field for a file that is invalid, or a model that is not served.
    """
    header = read_header(path)
    family = family_of(header)
    if header.metadata.get("split.count", 1) not in (0, 1):
        parts = f"the file is a part of {quoted(header.metadata['split.count'])}; merge them with llama-gguf-split"
        raise refusal(path, "split.count", parts)
    factors = header.tensors.get(ROPE_FACTORS)
    config = config_of(header, family, fp32_values(header, factors) if factors else None)
    files = {"config.json": config} | tokenizer_files(header)
    weights = weights_of(header, family, config["num_attention_heads"], config["num_key_value_heads"])
    for name, document in files.items():
        text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    _write_weights(folder / "model.safetensors", header, weights, progress)


def _write_weights(
    path: Path, header: GgufHeader, weights: list[Weight], progress: Callable[[str, int, int], None]
) -> None:
    """A safetensors file: the length of its header, the header, and the tensors without holes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for weight in weights:
        end = total + math.prod(weight.stored.shape) * BF16_BYTES
        entries[weight.name] = {"dtype": "BF16", "shape": weight.stored.shape, "data_offsets": (total, end)}
        total = end
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for weight in weights:
            write_weight(file, header, weight)
            progress("convert", file.tell() - 8 - len(encoded), total)

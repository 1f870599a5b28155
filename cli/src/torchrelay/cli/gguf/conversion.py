"""The conversion of a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.cli.errors import CliError
from torchrelay.cli.gguf.family import ROPE_FACTORS, GgufFamily, config_of, family_of
from torchrelay.cli.gguf.header import GgufHeader, read_header
from torchrelay.cli.gguf.refusal import quoted, refusal
from torchrelay.cli.gguf.tokenizer import tokenizer_files, unused_templates
from torchrelay.cli.gguf.weights import BF16_BYTES, Weight, fp32_values, gguf_name, weights_of, write_weight
from torchrelay.cli.left_out import left_out_note
from torchrelay.common.quantities import format_bytes
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.tensor_order import tensors_by_segment


@dataclass(frozen=True, slots=True)
class Conversion:
    """The documents and weights that a GGUF file becomes; nothing is written yet."""

    header: GgufHeader
    files: dict[str, Any]  # the documents by name; the chat template's is text
    weights: list[Weight]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are nearly all of the folder."""
        return sum(math.prod(weight.stored.shape) * BF16_BYTES for weight in self.weights)

    @property
    def notes(self) -> list[str]:
        """Sentences about what the conversion leaves out."""
        return left_out_note(unused_templates(self.header))

    def check_space(self, folder: Path) -> None:
        """Raises ``CliError`` if the file system of ``folder`` has less space than the converted weights need."""
        free = shutil.disk_usage(folder).free
        if free < self.num_bytes:
            fault = (
                f"{folder} has {format_bytes(free)} free, and the weights need {format_bytes(self.num_bytes)} in bf16"
            )
            raise CliError(f"{self.header.path}: {fault}", "free some, or set TMPDIR to a folder with more space")

    def write(self, folder: Path, progress: Callable[[str, int, int], None]) -> None:
        """Writes config.json, tokenizer, chat template and weights in bf16 into ``folder``.

        Raises ``CliError`` with the file and the tensor for a value that is not finite.
        """
        for name, document in self.files.items():
            text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        _write_weights(folder / "model.safetensors", self.header, self.weights, progress)


def plan_conversion(path: Path, num_bytes: int | None = None) -> Conversion:
    """Reads the header and compares its tensors with the model that its metadata describe. ``num_bytes``: the size that
    the file will have, if ``path`` has only its first ``MAX_HEADER_BYTES`` or more so far; RoPE's factors may lack.

    Raises ``CliError`` with the file and the field for a file that is invalid, or a model that is not served.
    """
    header = read_header(path, num_bytes)
    family = family_of(header)
    if header.metadata.get("split.count", 1) not in (0, 1):
        parts = f"the file is a part of {quoted(header.metadata['split.count'])}; merge them with llama-gguf-split"
        raise refusal(path, "split.count", parts)
    factors = header.tensors.get(ROPE_FACTORS)
    if factors and factors.offset + factors.num_bytes > path.stat().st_size:
        factors = None
    config = config_of(header, family, fp32_values(header, factors) if factors else None)
    files = {"config.json": config} | tokenizer_files(header)
    weights = weights_of(header, family, config["num_attention_heads"], config["num_key_value_heads"])
    _compare(header, family, config, weights)
    return Conversion(header, files, weights)


def _compare(header: GgufHeader, family: GgufFamily, config: dict[str, Any], weights: list[Weight]) -> None:
    """Raises ``CliError`` for a tensor that is missing, has another shape, or is not part of the model."""
    try:
        slots = [slot for segment in tensors_by_segment(read_config(config)) for slot in segment]
    except UnsupportedModel as error:
        raise refusal(header.path, f"{error.field} of the converted config.json", str(error)) from None
    by_name = {weight.name: weight.stored for weight in weights}
    for slot in slots:
        stored = by_name.pop(slot.name, None)
        if stored is None:
            raise refusal(
                header.path, gguf_name(slot.name, family), f"the tensor is missing; it has shape {slot.shape}"
            )
        if stored.shape != slot.shape:
            fault = f"shape {stored.shape} differs from {slot.shape}, which the metadata require"
            raise refusal(header.path, stored.name, fault)
    for stored in by_name.values():
        fault = f"the tensor is not part of {family.architecture} with {config['num_hidden_layers']} layers"
        raise refusal(header.path, stored.name, fault)


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

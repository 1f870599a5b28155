"""The weights of a GGUF file: their names in transformers, and their values in bf16."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from torchrelay.cli.gguf.family import ROPE_FACTORS, GgufFamily
from torchrelay.cli.gguf.header import GgufHeader, GgufTensor
from torchrelay.cli.gguf.refusal import refusal

BF16_BYTES = 2
_GROUP_VALUES = 4 << 20  # that are widened to fp32 at a time
_MAX_LISTED_BYTES = 4096
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([a-z_]+)\.(weight|bias)")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the file, and how to turn it into transformers'."""

    name: str
    stored: GgufTensor
    num_interleaved: int  # heads whose rows alternate between the halves; 0: none
    offset: float  # added to every value


def weights_of(header: GgufHeader, family: GgufFamily, num_heads: int, num_kv_heads: int) -> list[Weight]:
    """All weights but the factors of rotary frequencies. Raises ``CliError`` for a tensor that has no place."""
    inner = _INNER | (_SANDWICH if family.sandwich_norms else {})
    weights = []
    for stored in header.tensors.values():
        if stored.name == ROPE_FACTORS:
            continue
        name, match, heads = _OUTER.get(stored.name), _LAYER.fullmatch(stored.name), 0
        if match and match[2] in inner:
            name = f"model.layers.{int(match[1])}.{inner[match[2]]}.{match[3]}"
            heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(match[2], 0) if family.interleaved else 0
        if name is None:
            raise refusal(header.path, stored.name, f"the tensor is not part of {family.architecture}")
        if match and match[3] == "bias" and not (family.has_biases and match[2] in ("attn_q", "attn_k", "attn_v")):
            raise refusal(header.path, stored.name, f"biases of {family.architecture} are not supported here")
        if heads and stored.shape[0] % (2 * heads):
            raise refusal(header.path, stored.name, f"{stored.shape[0]:,} rows are not {heads} heads of even size")
        offset = -1.0 if family.unit_offset_norms and "norm" in stored.name else 0.0
        weights.append(Weight(name, stored, heads, offset))
    return weights


def gguf_name(name: str, family: GgufFamily) -> str:
    """The name that a file has for transformers' tensor."""
    for stored, other in _OUTER.items():
        if other == name:
            return stored
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    inner = _INNER | (_SANDWICH if family.sandwich_norms else {})
    return next((f"blk.{layer}.{stored}.{kind}" for stored, other in inner.items() if other == module), name)


def write_weight(file: BinaryIO, header: GgufHeader, weight: Weight) -> None:
    """Appends the values in bf16, a group of rows at a time."""
    for values in _fp32_groups(header, weight):
        if not np.isfinite(values).all():
            raise refusal(header.path, weight.stored.name, "some of its values are not finite")
        file.write(to_bf16(values).tobytes())


def fp32_values(header: GgufHeader, stored: GgufTensor) -> list[float]:
    """The values of a small tensor. Raises ``CliError`` for a large one."""
    if stored.num_bytes > _MAX_LISTED_BYTES:
        raise refusal(header.path, stored.name, f"{stored.num_bytes:,} bytes; at most {_MAX_LISTED_BYTES:,} are read")
    return [float(value) for group in _fp32_groups(header, Weight("", stored, 0, 0.0)) for value in group.ravel()]


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite values rounded to the nearest bf16, to the even of two, as torch does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _fp32_groups(header: GgufHeader, weight: Weight) -> Iterator[npt.NDArray[np.float32]]:
    """The rows in transformers' order, widened."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    stored, kind = weight.stored, GGMLQuantizationType[weight.stored.type]
    num_rows = max(int(np.prod(stored.shape[:-1])), 1)
    shape = num_rows, stored.num_bytes // num_rows
    rows = np.memmap(header.path, np.uint8, "r", stored.offset, shape)
    if weight.num_interleaved:
        order = np.arange(num_rows).reshape(weight.num_interleaved, -1, 2).swapaxes(1, 2).ravel()
    group = max(_GROUP_VALUES // stored.shape[-1], 1)
    for begin in range(0, num_rows, group):
        place = slice(begin, begin + group)
        values = dequantize(rows[order[place] if weight.num_interleaved else place], kind).astype(
            np.float32, copy=False
        )
        yield values + np.float32(weight.offset) if weight.offset else values

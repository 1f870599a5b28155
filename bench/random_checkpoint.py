"""Llama checkpoints of any size: the shapes of their tensors, and random weights written without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LLAMA_33MB: dict[str, Any] = {  # in fp32; a step takes some milliseconds on a CPU
    "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
BF16_BYTES = 2
BLOCK_BYTES = 8 << 20
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The fields of config.json that determine the size; embeddings are tied."""

    vocab_size: int
    num_layers: int
    hidden: int
    intermediate: int
    head_dim: int = 64

    def grown_to(self, num_bytes: int) -> LlamaShape:
        """This shape with enough layers for ``num_bytes`` of weights."""
        bare = replace(self, num_layers=0)
        layer_bytes = replace(bare, num_layers=1).num_bytes - bare.num_bytes
        num_layers = math.ceil((num_bytes - bare.num_bytes) / layer_bytes)
        return replace(self, num_layers=num_layers)

    @property
    def num_bytes(self) -> int:
        return _size(llama_tensors(self.config()).values())

    def config(self) -> dict[str, Any]:
        num_heads = self.hidden // self.head_dim
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "eos_token_id": self.vocab_size - 1,
        }


def llama_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint's tensors; norms have one dimension."""
    hidden, inner, vocab_size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab_size, hidden)}
    for index in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    return tensors if config.get("tie_word_embeddings") else {**tensors, HEAD: (vocab_size, hidden)}


def write_checkpoint(folder: Path, shape: LlamaShape, tokenizer_json: bytes, num_shards: int = 1) -> Path:
    """Writes the folder of a chat model, whose layers are in several files or one, and returns it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    tensors = llama_tensors(shape.config())
    if num_shards == 1:
        _write_weights(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    weight_map = {name: f"model-{index * num_shards // len(names)}.safetensors" for index, name in enumerate(names)}
    for file in dict.fromkeys(weight_map.values()):
        _write_weights(folder / file, {name: tensors[name] for name in names if weight_map[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _size(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(BF16_BYTES * math.prod(shape) for shape in shapes)


def _write_weights(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + _size([shape])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    random = np.random.default_rng(0)
    with path.open("wb", buffering=0) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for begin in range(0, end, BLOCK_BYTES):
            bits = np.frombuffer(random.bytes(min(BLOCK_BYTES, end - begin)), np.uint16)
            file.write((bits & 0x80FF | 0x3C00).tobytes())  # of either sign, from 2**-7 to 2**-5: all finite

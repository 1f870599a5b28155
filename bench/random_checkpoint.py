"""A valid Llama checkpoint of any size with random weights, written without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BF16_BYTES = 2
BLOCK_BYTES = 8 << 20
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The numbers of config.json that decide the size; embeddings are tied."""

    vocab_size: int
    num_layers: int
    hidden: int
    intermediate: int
    head_dim: int = 64

    def grown_to(self, num_bytes: int) -> LlamaShape:
        """This shape with enough layers for ``num_bytes`` of weights."""
        bare = LlamaShape(self.vocab_size, 0, self.hidden, self.intermediate, self.head_dim)
        one = LlamaShape(self.vocab_size, 1, self.hidden, self.intermediate, self.head_dim)
        num_layers = math.ceil((num_bytes - bare.num_bytes) / (one.num_bytes - bare.num_bytes))
        return LlamaShape(self.vocab_size, num_layers, self.hidden, self.intermediate, self.head_dim)

    @property
    def num_bytes(self) -> int:
        return _size(self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, intermediate = self.hidden, self.intermediate
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"},
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            found |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        return {**found, "model.norm.weight": (hidden,)}

    def config(self) -> dict[str, object]:
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


def write_checkpoint(folder: Path, shape: LlamaShape, tokenizer_json: bytes) -> Path:
    """Writes the folder of a chat model; returns it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    _write_weights(folder / "model.safetensors", shape.tensors())
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
            file.write((bits & 0x80FF | 0x3C00).tobytes())  # of either sign, between 2**-7 and 2**-5: all finite

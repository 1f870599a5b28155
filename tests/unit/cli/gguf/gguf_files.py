"""GGUF files made of Hugging Face checkpoints, as llama.cpp's converter makes them, and files with a faulty header."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import load_file, save_file

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "smollm3": gguf.MODEL_ARCH.SMOLLM3}
ARCHITECTURES |= {"qwen3": gguf.MODEL_ARCH.QWEN3, "gemma2": gguf.MODEL_ARCH.GEMMA2}
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_PLACES_OF_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # fp16 values in a block


def quantized(values: npt.NDArray[np.float32], type_name: str, seed: int) -> npt.NDArray[np.uint8]:
    """The values in blocks; of the K types, which the library only reads, random blocks of the same shape."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name not in _PLACES_OF_SCALES:
        return gguf.quantize(values, kind).view(np.uint8)
    block, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (values.size // block, num_bytes), np.uint8)
    for place in _PLACES_OF_SCALES[type_name]:
        scales = random.uniform(1e-4, 2e-4, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path, folder: Path, type_name: str = "F32", rope_freqs: npt.NDArray[np.float32] | None = None, **metadata: Any
) -> Path:
    """Writes the checkpoint in ``folder`` with its matrices in a type, and rewrites ``folder`` in bf16 with the values
    that these have. ``metadata`` replaces values, by their keys with "__" for dots; None leaves a value out.
    """
    config = json.loads((folder / "config.json").read_text())
    name, tensors = config["model_type"], load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, name)
    replaced = {key.replace("__", "."): value for key, value in metadata.items()}
    if architecture := replaced.pop("general.architecture", None):
        writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(config, name) | tokenizer_metadata(folder) | replaced).items():
        _add(writer, key, value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for seed, (tensor_name, tensor) in enumerate(sorted(tensors.items())):
        values = tensor.float().numpy()
        stored_type = gguf.GGMLQuantizationType[type_name if values.ndim > 1 else "F32"]
        raw = quantized(values, stored_type.name, seed)
        exact = gguf.dequantize(raw, stored_type).reshape(values.shape)
        tensors[tensor_name] = torch.from_numpy(exact.copy()).to(torch.bfloat16)
        num_heads = heads.get(tensor_name.split(".")[-2], 0) if name in ("llama", "smollm3") else 0
        if num_heads:  # llama.cpp's own expression
            raw = raw.reshape(num_heads, 2, len(raw) // num_heads // 2, -1).swapaxes(1, 2).reshape(raw.shape)
        if name.startswith("gemma") and "norm" in tensor_name:
            raw = (values + 1).view(np.uint8)
            tensors[tensor_name] = torch.from_numpy((values + 1) - 1).to(torch.bfloat16)
        stored_name = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None
        writer.add_tensor(stored_name, np.ascontiguousarray(raw), raw_dtype=stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return path


def _metadata(config: dict[str, Any], name: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope.freq_base": rope.get("rope_theta"),
    }
    return {f"{name}.{key}": value for key, value in values.items()}


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """The tokenizer of a folder, which must be GPT-2's kind."""
    document = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in document["added_tokens"]}
    tokens = {number: token for token, number in document["model"]["vocab"].items()} | special
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [tokens[number] for number in range(len(tokens))],
        "token_type": [3 if number in special else 1 for number in range(len(tokens))],
        "merges": merges or None,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()} | {"tokenizer.chat_template": template}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


class FaultyFile:
    """A GGUF file written number by number."""

    def __init__(self, version: int = 3, num_tensors: int = 0, num_values: int = 0, magic: bytes = b"GGUF") -> None:
        self.content = magic + struct.pack("<IQQ", version, num_tensors, num_values)

    def text(self, text: str | bytes, length: int | None = None) -> FaultyFile:
        encoded = text if isinstance(text, bytes) else text.encode()
        return self.number("Q", len(encoded) if length is None else length).raw(encoded)

    def number(self, code: str, value: float) -> FaultyFile:
        return self.raw(struct.pack(f"<{code}", value))

    def raw(self, content: bytes) -> FaultyFile:
        self.content += content
        return self

    def tensor(self, name: str, shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> FaultyFile:
        self.text(name).number("I", len(shape))
        for size in shape:
            self.number("Q", size)
        return self.number("I", kind).number("Q", offset)

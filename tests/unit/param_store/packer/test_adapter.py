"""Adapters that do not fit their base, or are hostile, are refused with the file, and the field or tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.param_store.model_folders import Tensors, config_of
from torchrelay.modelspec.adapter import MAX_RANK
from torchrelay.param_store.packer.adapter import check_adapter
from torchrelay.param_store.packer.core import PackRefused

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = config_of()  # 2 layers of 4 heads of 16, 2 of keys and values; hidden 64, intermediate 96
SHAPES = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.down_proj": (64, 96)}
DOCUMENT: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "bias": "none",
    "lora_dropout": 0.1,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "peft_version": "0.17.1",
}


def name_of(layer: int, module: str, letter: str = "A") -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{letter}.weight"


def a_tensor(*shape: int, dtype: str = "F32", value: bytes = bytes(4)) -> tuple[str, tuple[int, ...], bytes]:
    size = 1
    for each in shape:
        size *= each
    return dtype, shape, value * size


def adapter_tensors(rank: int = 4) -> Tensors:
    tensors = Tensors()
    for layer in range(2):
        for module, (num_out, num_in) in SHAPES.items():
            tensors.by_name[name_of(layer, module)] = a_tensor(rank, num_in)
            tensors.by_name[name_of(layer, module, "B")] = a_tensor(num_out, rank)
    return tensors


def write(folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(DOCUMENT | changes))
    (tensors or adapter_tensors()).write(folder / WEIGHTS)
    return folder


def refusal(folder: Path, base_dtype: str = "BF16") -> tuple[str, str]:
    with pytest.raises(PackRefused) as refused:
        check_adapter(folder, BASE, base_dtype)
    return refused.value.file, refused.value.detail


def test_every_form_that_peft_saves_is_accepted(tmp_path: Path) -> None:
    assert check_adapter(write(tmp_path / "list"), BASE, "BF16") == 6
    assert (
        check_adapter(write(tmp_path / "pattern", target_modules=r".*\.(q_proj|v_proj|down_proj)$"), BASE, "BF16") == 6
    )
    long = ["self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj", "mlp.down_proj"]
    assert check_adapter(write(tmp_path / "long", target_modules=long), BASE, "BF16") == 6
    one_layer = Tensors({name: each for name, each in adapter_tensors().by_name.items() if ".layers.1." in name})
    assert check_adapter(write(tmp_path / "layer", one_layer, layers_to_transform=[1]), BASE, "BF16") == 3


CONFIG_FAULTS: dict[str, Any] = {
    "peft_type": "LOHA",
    "task_type": "SEQ_CLS",
    "use_dora": True,
    "lora_bias": True,
    "bias": "all",
    "modules_to_save": ["embed_tokens"],
    "init_lora_weights": "pissa",
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 2]],
    "fan_in_fan_out": True,
    "a_field_of_the_future": {"x": 1},
    "r": MAX_RANK + 1,
    "lora_alpha": "8",
    "use_rslora": "yes",
    "target_modules": ["q_proj", "embed_tokens"],
    "rank_pattern": {"(a+)+$": 4},
    "alpha_pattern": [8],
    "layers_to_transform": ["0"],
}


@pytest.mark.parametrize("field", CONFIG_FAULTS)
def test_unsupported_config_is_refused_by_its_field(tmp_path: Path, field: str) -> None:
    file, detail = refusal(write(tmp_path / "adapter", **{field: CONFIG_FAULTS[field]}))
    assert (file, detail.partition(":")[0]) == (CONFIG, field)


@pytest.mark.parametrize("rank", [0, -1, True, 4.0, None, 10**30])
def test_rank_is_a_whole_number_within_its_limit(tmp_path: Path, rank: Any) -> None:
    file, detail = refusal(write(tmp_path / "adapter", r=rank))
    assert (file, detail.partition(":")[0]) == (CONFIG, "r")


QUERY, QUERY_B = name_of(1, "self_attn.q_proj"), name_of(1, "self_attn.q_proj", "B")
NAN = struct.pack("<f", float("nan"))
TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "another rank": (lambda t: t.update({QUERY: a_tensor(8, 64)}), QUERY, "rank 4 and the base model require (4, 64)"),
    "transposed": (lambda t: t.update({QUERY_B: a_tensor(4, 64)}), QUERY_B, "its shape is (4, 64)"),
    "another base": (lambda t: t.update({QUERY: a_tensor(4, 128)}), QUERY, "its shape is (4, 128)"),
    "a vector": (lambda t: t.update({QUERY: a_tensor(256)}), QUERY, "its shape is (256,)"),
    "integers": (lambda t: t.update({QUERY: a_tensor(4, 64, dtype="I32")}), QUERY, "its dtype is I32"),
    "NaN": (lambda t: t.update({QUERY: a_tensor(4, 64, value=NAN)}), QUERY, "element 0 is NaN"),
    "half a pair": (lambda t: t.pop(QUERY_B), QUERY_B, "it is missing"),
    "a projection less": (lambda t: (t.pop(QUERY), t.pop(QUERY_B)), QUERY, "it is missing"),
    "a layer too many": (
        lambda t: t.update({name_of(2, "self_attn.q_proj"): a_tensor(4, 64)}),
        name_of(2, "self_attn.q_proj"),
        "it belongs to no projection",
    ),
    "magnitudes": (
        lambda t: t.update({QUERY.replace("lora_A", "lora_magnitude_vector"): a_tensor(64)}),
        QUERY.replace("lora_A", "lora_magnitude_vector"),
        "it belongs to no projection",
    ),
    "a name of a field": (lambda t: t.update({"r": a_tensor(1)}), "r", "it belongs to no projection"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_unsupported_tensor_is_refused_by_its_name(tmp_path: Path, fault: str) -> None:
    change, name, detail = TENSOR_FAULTS[fault]
    tensors = adapter_tensors()
    change(tensors.by_name)
    file, text = refusal(write(tmp_path / "adapter", tensors))
    assert file == WEIGHTS and text.startswith(f"tensor '{name}': ") and detail in text


def test_ranks_by_pattern_are_compared_with_the_shapes(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", rank_pattern={"layers.1.self_attn.q_proj": 8})
    assert "rank 8" in refusal(folder)[1]
    tensors = adapter_tensors()
    tensors.by_name |= {QUERY: a_tensor(8, 64), QUERY_B: a_tensor(64, 8)}
    assert check_adapter(write(folder, tensors, rank_pattern={"layers.1.self_attn.q_proj": 8}), BASE, "BF16") == 6


def test_broken_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])
    assert refusal(folder)[0] == WEIGHTS
    write(folder)
    (folder / CONFIG).write_text('{"r": 4, "r": 5}')
    assert refusal(folder) == (CONFIG, "the key 'r' appears twice in one object")
    with pytest.raises(PackRefused, match=r"self_attn\.q_proj"):
        check_adapter(write(folder), config_of(hidden_size=128, num_attention_heads=8), "BF16")


@pytest.mark.parametrize(
    ("dtype", "value", "base_dtype", "is_refused"),
    [
        ("F32", struct.pack("<f", 65519.0), "F16", False),  # rounds to the largest number of F16
        ("F32", struct.pack("<f", -65520.0), "F16", True),
        ("BF16", struct.pack("<H", 0x4780), "F16", True),
        ("F32", struct.pack("<f", 65520.0), "BF16", False),
        ("F32", struct.pack("<f", 3.4e38), "BF16", True),
    ],
)
def test_number_beyond_the_range_of_the_base_is_refused(
    tmp_path: Path, dtype: str, value: bytes, base_dtype: str, is_refused: bool
) -> None:
    tensors = adapter_tensors()
    name = name_of(0, "mlp.down_proj")
    kind, shape, data = a_tensor(4, 96, dtype=dtype, value=bytes(len(value)))
    tensors.by_name[name] = kind, shape, data[: -len(value)] + value
    folder = write(tmp_path / "adapter", tensors)
    if is_refused:
        file, detail = refusal(folder, base_dtype)
        assert file == WEIGHTS
        assert (
            detail == f"tensor {name!r}: element 383 is beyond the range of {base_dtype}, the dtype of the base model"
        )
    else:
        assert check_adapter(folder, BASE, base_dtype) == 6

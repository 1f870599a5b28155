"""Packs of weights that vLLM computes quantized: every tensor as it is, and hostile ones refused by file and tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.quantized_checkpoints import FORMATS, Tensors, quantized_checkpoint
from tests.unit.param_store.model_folders import pack_refusal
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.transfer.manifest import Manifest, decode_manifest

LAYER = "model.layers.1.mlp.down_proj."


def packed(folder: Path, *engines: str) -> tuple[Manifest, bytes]:
    path = folder.with_suffix(".pack")
    pack(folder, path, 0, engines)
    return decode_manifest(path.with_suffix(".manifest").read_bytes()), path.read_bytes()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "w8a8"])
def test_every_tensor_is_packed_as_it_is_in_the_order_of_layers(tmp_path: Path, name: str) -> None:
    folder, _ = quantized_checkpoint(tmp_path, name)
    manifest, data = packed(folder)
    stored = load_file(folder / "model.safetensors")
    assert {entry.name for entry in manifest.tensors} == set(stored)
    for entry in manifest.tensors:
        raw = stored[entry.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (entry.shape, data[entry.offset : entry.offset + entry.num_bytes]) == (stored[entry.name].shape, raw)
        layer = int(entry.name.split(".")[2]) + 1 if ".layers." in entry.name else 4 * ("embed" not in entry.name)
        segment = manifest.segments[layer]
        assert segment.begin <= entry.offset < segment.end and entry.offset % 2 == 0
    assert manifest.dtype == "F16" and manifest.config["quantization_config"] == FORMATS[name].config


def changed(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def set_last(name: str, value: float) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[LAYER + name].view(-1)[-1] = value

    return change


def replaced(name: str, tensor: torch.Tensor | None) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        del tensors[LAYER + name]
        if tensor is not None:
            tensors[LAYER + name] = tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("awq", set_last("scales", float("nan")), "scales': element 191 is NaN; all weights must be finite numbers"),
        ("awq", set_last("scales", -1.0), "scales': element 191 is negative; all scales must be positive numbers"),
        ("gptq", set_last("g_idx", 7), "g_idx': its numbers contradict config.json"),
        ("gptq", set_last("g_idx", -1), "g_idx': its numbers contradict config.json"),
        ("gptq", replaced("g_idx", None), "g_idx' is missing; config.json requires shape (96,)"),
        ("gptq", replaced("qzeros", torch.zeros(3, 9, dtype=torch.int32)), "qzeros': shape (3, 9) differs from (3, 8)"),
        ("gptq", replaced("qweight", torch.zeros(12, 64)), "qweight': dtype F32 is not supported; supported are I32"),
        ("w4a16", set_last("weight_shape", 2**40), "weight_shape': its numbers contradict config.json"),
        ("w4a16", set_last("weight_scale", float("inf")), "weight_scale': element 191 is infinite; all weights must"),
        ("fp8", set_last("weight", float("nan")), "weight': element 6,143 is NaN; all weights must be finite numbers"),
        ("fp8", set_last("weight_scale", 0.0), "weight_scale': element 0 is zero; all scales must be positive numbers"),
        ("fp8-blocks", set_last("weight_scale_inv", -1.0), "weight_scale_inv': element 0 is negative; all scales"),
        ("fp8-channels", lambda tensors: tensors.update({f"{LAYER}input_scale": torch.ones(1)}), "input_scale' is not"),
    ],
)
def test_hostile_tensors_are_refused_by_file_and_tensor(
    tmp_path: Path, name: str, change: Callable[[Tensors], Any], fault: str
) -> None:
    folder = changed(quantized_checkpoint(tmp_path, name)[0], change)
    assert str(pack_refusal(folder)).startswith(f"model.safetensors: tensor '{LAYER}{fault}")


def test_layers_that_do_not_fit_the_groups_are_refused(tmp_path: Path) -> None:
    folder, _ = quantized_checkpoint(tmp_path, "awq")
    with_config(folder, group_size=40)
    refused = "config.json: quantization_config.group_size: a layer of 64 does not"
    assert str(pack_refusal(folder)).startswith(refused)


ATTENTION = "model.layers.0.self_attn."


def with_config(folder: Path, **changes: Any) -> Path:
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def unquantized(folder: Path, meant: Path, *layers: str) -> Path:
    """The checkpoint with these layers as plain weights in F16."""
    weights = load_file(meant / "model.safetensors")

    def change(tensors: Tensors) -> None:
        for layer in layers:
            for name in [each for each in tensors if each.startswith(f"{layer}.")]:
                del tensors[name]
            tensors[f"{layer}.weight"] = weights[f"{layer}.weight"].half()

    return changed(folder, change)


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("awq", {"modules_to_not_convert": ["0.self_attn.q_proj", "0.self_attn.k_", "0.self_attn.v"]}),
        ("awq", {"modules_to_not_convert": ["0.self_attn.qkv", "lm_head"]}),
        ("fp8", {"ignored_layers": [f"{ATTENTION}{letter}_proj" for letter in "qkv"], "modules_to_not_convert": ["x"]}),
        ("fp8", {"modules_to_not_convert": [f"{ATTENTION}qkv_proj"]}),
        (
            "fp8-channels",
            {"ignore": [r"re:^model\.layers\.0.*q_proj$", "re:.*0.*k_.*", f"{ATTENTION}v_proj", "lm_head"]},
        ),
        ("fp8-channels", {"ignore": ["re:.*layers.0.*attn.qkv_proj"]}),
    ],
)
def test_layers_that_the_config_leaves_plain_are_packed_so(tmp_path: Path, name: str, listed: dict[str, Any]) -> None:
    layers = [f"{ATTENTION}{letter}_proj" for letter in "qkv"]
    folder = with_config(unquantized(*quantized_checkpoint(tmp_path, name), *layers), **listed)
    packed(folder)


Q, QUERY, BY = f"{ATTENTION}q_proj", "q_proj.weight': it is stored in F16, and by {}", "q_proj.weight': by {}"


@pytest.mark.parametrize(
    ("name", "plain", "listed", "fault"),
    [
        ("fp8", "q", {"ignored_layers": []}, f"{QUERY}.ignored_layers its layer"),
        ("fp8", "qkv", {"ignored_layers": ["q_proj"]}, f"{QUERY}.ignored_layers"),
        ("fp8-channels", "q", {"ignore": ["re:.*k_proj$"]}, f"{QUERY}.ignore its"),
        ("awq", "qkv", {}, f"{QUERY}.modules_to_not_convert its layer is quantized"),
        ("gptq", "q", {}, f"{QUERY} its layer is quantized"),
        ("fp8", "", {"ignored_layers": [Q]}, f"{BY}.ignored_layers its layer is not"),
        ("awq", "", {"modules_to_not_convert": ["q_proj"]}, f"{BY}.modules_to_not_convert its layer is"),
        ("w4a16", "", {"ignore": ["re:.*q_proj"]}, f"{BY}.ignore its layer is not quantized, and it is"),
        ("fp8", "q", {"ignored_layers": [Q]}, "k_proj.weight': vLLM computes it and 'model.layers.0"),
    ],
)
def test_layers_that_are_not_stored_as_the_config_says_are_refused_by_file_and_tensor(
    tmp_path: Path, name: str, plain: str, listed: dict[str, Any], fault: str
) -> None:
    layers = [f"{ATTENTION}{letter}_proj" for letter in plain]
    folder = with_config(unquantized(*quantized_checkpoint(tmp_path, name), *layers), **listed)
    expected = f"model.safetensors: tensor '{ATTENTION}{fault.format('quantization_config')}"
    assert str(pack_refusal(folder)).startswith(expected)


def with_bias(value: float, size: int = 64, dtype: torch.dtype = torch.float16) -> Callable[[Tensors], Any]:
    bias = torch.zeros(size, dtype=dtype)
    bias[-1] = value
    return lambda tensors: tensors.update({f"{LAYER}bias": bias})


def test_biases_of_gptq_that_are_zero_are_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(quantized_checkpoint(tmp_path, "gptq")[0], with_bias(-0.0))
    manifest, _ = packed(folder)
    assert f"{LAYER}bias" not in {entry.name for entry in manifest.tensors}
    assert f"LlamaForCausalLM does not use were left out: '{LAYER}bias'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("gptq", with_bias(1.0), "element 63 is not zero, and config.json has no biases"),
        ("gptq", with_bias(float("nan")), "element 63 is not zero, and config.json has no biases"),
        ("gptq", with_bias(0.0, 65), "is not part of LlamaForCausalLM"),
        ("gptq", with_bias(0.0, dtype=torch.float64), "is not part of LlamaForCausalLM"),
        ("awq", with_bias(0.0), "is not part of LlamaForCausalLM"),
    ],
)
def test_other_biases_are_refused(tmp_path: Path, name: str, change: Callable[[Tensors], Any], fault: str) -> None:
    refused = str(pack_refusal(changed(quantized_checkpoint(tmp_path, name)[0], change)))
    assert refused.startswith(f"model.safetensors: tensor '{LAYER}bias'") and fault in refused


def test_weights_that_the_config_calls_quantized_and_are_not_are_refused(tmp_path: Path) -> None:
    folder, _ = quantized_checkpoint(tmp_path / "gptq", "gptq")
    packed(folder)
    refused = "tensor 'lm_head.weight': it is stored in F16, and by quantization_config"
    assert refused in str(pack_refusal(with_config(folder, lm_head=True))), "a head only where gptq declares it"
    folder, meant = quantized_checkpoint(tmp_path / "awq", "awq")
    (folder / "model.safetensors").write_bytes((meant / "model.safetensors").read_bytes())
    refused = r"q_proj.weight': it is stored in F32, and by quantization_config.*quantized"
    assert re.search(refused, str(pack_refusal(folder)))


@pytest.mark.parametrize(("name", "engine", "other"), [("awq", "vllm", "torchrelay"), ("w8a8", "torchrelay", "vllm")])
def test_weights_that_no_engine_of_the_pool_computes_are_refused(
    tmp_path: Path, name: str, engine: str, other: str
) -> None:
    folder, _ = quantized_checkpoint(tmp_path, name)
    assert str(pack_refusal(folder, [other])) == (
        f"config.json: quantization_config: only the engine {engine} computes weights that are quantized so; "
        f"this model may run with {other}"
    )
    packed(folder, engine, other)

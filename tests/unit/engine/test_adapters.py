"""fp32 greedy output with adapters equals PEFT's, token for token, for any mix of adapters in a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import ALL, ATTENTION, FUSED, make_adapter, with_adapter
from tests.support.checkpoints import greedy_reference
from tests.unit.engine.harness import (
    GREEDY,
    Model,
    ModelOf,
    assert_idle,
    export_prefill,
    group_of,
    half_loaded,
    hand_over,
    import_prefill,
    outputs,
    prompt_of,
    run,
)
from torchrelay.common.errors import DataCorrupted
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.low_rank import Adapter
from torchrelay.engine.weights.adapter import AdapterReader

FORMS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"targets": ATTENTION, "rank": 8},
    "query-value": {"targets": ("q_proj", "v_proj"), "rank": 1},
    "rslora": {"use_rslora": True, "rank": 6},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.k_proj": 7, "down_proj": 2},
        "alpha_pattern": {"^model.layers.0.mlp.up_proj": 20, "v_proj": 3},
    },
}


def read(instance: Instance, folder: Path) -> Adapter:
    document, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    return instance.adapter_reader(folder.name, document.read_bytes(), weights.read_bytes()).read()


def expected(model: Model, folder: Path, prompt: tuple[int, ...]) -> list[int]:
    return greedy_reference(with_adapter(model.reference, folder), list(prompt), GREEDY.max_tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "llama-bias"])
def test_any_mix_of_adapters_equals_peft(model_of: ModelOf, tmp_path: Path, family: str) -> None:
    """A budget of 20 positions puts decodes and chunks of all adapters, and of the base, into the same batches."""
    model = model_of(family)
    instance = model.instance(token_budget=20, page_tokens=8)
    wanted, distinct = {}, set()
    for number, (name, form) in enumerate([*FORMS.items(), ("", {}), ("all", {})]):
        prompt, group_id = prompt_of(17 + number), f"{number}/0"
        group = group_of(prompt, group_id)
        if name:
            folder = make_adapter(tmp_path / name, model.reference, seed=len(name), **form)
            group = replace(group, adapter=read(instance, folder))
            wanted[group_id, 0] = expected(model, folder, prompt)
        else:
            wanted[group_id, 0] = model.expected(prompt)
        distinct.add(tuple(wanted[group_id, 0]) != tuple(model.expected(prompt)))
        instance.prefill(group)
    assert outputs(run(instance)) == wanted
    assert distinct == {True, False}
    assert_idle(instance)


def test_fused_projections_and_attention_of_experts(model_of: ModelOf, tmp_path: Path) -> None:
    for family, targets in (("phi3", FUSED), ("qwen3-moe", ATTENTION)):
        model = model_of(family)
        folder, instance = make_adapter(tmp_path / family, model.reference, targets=targets), model.instance()
        instance.prefill(replace(group_of(prompt_of(30)), adapter=read(instance, folder)))
        assert outputs(run(instance))["r/0", 0] == expected(model, folder, prompt_of(30))


def test_prefixes_are_shared_within_an_adapter(model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of("llama")
    instance, prompt, cached = model.instance(), prompt_of(70), {}
    adapters = [None, *(read(instance, make_adapter(tmp_path / f"{n}", model.reference, seed=n)) for n in range(2))]
    for turn in range(2):
        for number, adapter in enumerate(adapters):
            instance.prefill(replace(group_of(prompt, f"{turn}/{number}"), adapter=adapter))
            cached[turn, number] = next(token.num_cached for step in run(instance) for token in step.tokens)
    assert cached == {(0, n): 0 for n in range(3)} | {(1, n): 64 for n in range(3)}


@pytest.mark.parametrize("way", ["handed over", "moved", "preempted"])
def test_adapter_stays_with_its_group(model_of: ModelOf, tmp_path: Path, way: str) -> None:
    model, prompt = model_of("llama"), prompt_of(40)
    folder = make_adapter(tmp_path / "adapter", model.reference)
    source, target = model.instance(), model.instance()
    group = replace(group_of(prompt), adapter=read(source, folder))
    if way == "handed over":
        last, steps = hand_over(source, target, group)
        tokens = [*(token.token_id for token in last.tokens), *outputs(steps)["r/0", 0]]
    elif way == "moved":
        source = half_loaded(model, 2)
        source.prefill(group)
        run(source)
        import_prefill(target, export_prefill(source))
        tokens = outputs(run(target))["r/0", 0]
    else:
        source.prefill(group)
        steps = [source.step() for _ in range(5)]
        source.preempt("r/0")
        tokens = outputs([*steps, *run(source)])["r/0", 0]
    assert tokens == expected(model, folder, prompt)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_logits_are_as_exact_as_without_an_adapter(model_of: ModelOf, tmp_path: Path, dtype: str) -> None:
    """Most tokens agree with PEFT's, which rounds its own 16-bit products elsewhere."""
    model, agreeing = model_of("llama", dtype=dtype), 0
    folder, instance = make_adapter(tmp_path / "adapter", model.reference, targets=ALL), model.instance()
    adapter = read(instance, folder)
    for number in range(8):
        instance.prefill(replace(group_of(prompt_of(20, number), f"{number}/0"), adapter=adapter))
    first = {key: tokens[0] for key, tokens in outputs(run(instance)).items()}
    for number in range(8):
        agreeing += first[f"{number}/0", 0] == expected(model, folder, prompt_of(20, number))[0]
    assert agreeing >= 6


def test_files_that_do_not_fit_the_model_are_refused(model_of: ModelOf, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", model_of("llama").reference)
    with pytest.raises(DataCorrupted, match="cannot be used"):
        read(model_of("qwen3").instance(), folder)
    with pytest.raises(DataCorrupted, match="cannot be used"):
        model_of("llama").instance().adapter_reader("", b"{", b"")


def test_number_that_overflows_in_the_dtype_of_the_model_is_refused(model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of("llama", dtype="float16")
    folder = make_adapter(tmp_path / "adapter", model.reference, targets=ATTENTION)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    tensors[name][-1, -1] = 65520.0
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(DataCorrupted, match=f"{name} has a number beyond the range of torch.float16"):
        read(model.instance(), folder)


def test_engine_steps_between_the_parts_of_an_adapter(model_of: ModelOf, tmp_path: Path) -> None:
    """A large adapter stalled the running answers."""
    model = model_of("llama")
    folder, instance = make_adapter(tmp_path / "adapter", model.reference), model.instance()
    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    reader = AdapterReader("a", files[0], files[1], instance.config, torch.float32, torch.device("cpu"), turn_bytes=1)
    instance.prefill(group_of(prompt_of(20), "base/0"))
    steps, num_parts = [], 1
    while reader.read_part():
        steps.append(instance.step())
        num_parts += 1
    assert num_parts == 7 * instance.config.num_layers
    adapter = reader.read()
    assert adapter.num_bytes == reader.num_bytes
    instance.prefill(replace(group_of(prompt_of(30)), adapter=adapter))
    tokens = outputs([*steps, *run(instance)])
    assert tokens["base/0", 0] == model.expected(prompt_of(20))
    assert tokens["r/0", 0] == expected(model, folder, prompt_of(30))

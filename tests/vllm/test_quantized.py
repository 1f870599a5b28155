"""Quantized checkpoints in a slot of vLLM: it takes their tensors from the arena, or names what its kernels lack."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.integration.roles_testbed import running_testbed
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_checkpoints import FORMATS, quantized_checkpoint
from tests.support.wait import eventually
from tests.unit.modelspec.test_quantization import LLAMA, W8A8
from tests.unit.param_store.running_store import publish, running_store
from tests.vllm.test_start import loading
from torchrelay.engine.core import LoadFailed
from torchrelay.vllm import served_model
from torchrelay.vllm.engine import VllmEngine
from torchrelay.vllm.model_document import model_document
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engine import EngineHooks
from torchrelay.worker.slot.slot import FREE, READY

PROMPTS = [[(7 * salt + 3 * index) % 250 for index in range(length)] for salt, length in enumerate((1, 33, 64))]
NUM_TOKENS = 16
INT4_KERNEL = "cpu_gemm_wna16"  # vLLM compiles it for CPUs with AVX-512


async def vllm_alone(folder: Path) -> list[list[int]]:
    """vLLM's answers to ``PROMPTS`` when it reads the files itself."""
    arguments = str(folder), json.dumps(PROMPTS), str(NUM_TOKENS)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.vllm.greedy_tokens", *arguments, stdout=PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    tokens: list[list[int]] = json.loads(output.splitlines()[-1])
    return tokens


async def test_fp8_weights_from_the_arena_answer_as_those_of_the_files(tmp_path: Path, nats_url: str) -> None:
    checkpoint, _ = quantized_checkpoint(tmp_path / "model", "fp8-channels", dtype="bfloat16")
    expected = await vllm_alone(checkpoint)
    async with running_store(tmp_path / "published") as store:
        description = await publish(store, checkpoint)
    assert (description.engine, description.dtype) == ("vllm", "F8_E4M3")
    remote = tmp_path / "published" / "remote"
    settings: dict[str, Any] = {"apart": False, "engine": "vllm", "kv_pool_bytes": 8 << 20}
    async with running_testbed(tmp_path, remote, description, nats_url, **settings) as scene:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            request = scene.request(prompt, max_tokens=NUM_TOKENS)
            await (await scene.send(request)).finished()
            assert request.tokens() == tokens
        await scene.assert_idle()


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16"])
async def test_weights_of_4_bits_are_loaded_where_vllm_has_kernels_and_refused_with_its_reason_elsewhere(
    tmp_path: Path, nats_url: str, name: str
) -> None:
    checkpoint, _ = quantized_checkpoint(tmp_path / "model", name)
    async with loading(tmp_path, checkpoint, nats_url) as worker:
        slot = worker.worker.slot
        await eventually(lambda: slot.state == READY or (slot.state == FREE and slot.error), "the end of the load")
        if hasattr(torch.ops._C, INT4_KERNEL):
            await worker.worker.engine.call(lambda: None)  # until the first step has built vLLM
            assert not slot.error
        else:
            await eventually(lambda: slot.state == FREE and slot.error, "the refusal")
            assert "vLLM does not serve this model in this slot: " in slot.error
            assert INT4_KERNEL in slot.error


async def test_blocks_of_fp8_end_the_load_with_vllms_reason(tmp_path: Path, nats_url: str) -> None:
    checkpoint, _ = quantized_checkpoint(tmp_path / "model", "fp8-blocks")
    async with loading(tmp_path, checkpoint, nats_url) as worker:
        slot = worker.worker.slot
        await eventually(lambda: slot.state == FREE and slot.error, "the end of the load")
        assert "Failed to find a kernel that can implement the ScaledMM linear layer" in slot.error


def test_weights_of_another_engine_end_the_load() -> None:
    settings = WorkerSettings(node_key="00" * 32, worker_id="w", device="cpu", kv_pool_bytes=1 << 20)
    config = LLAMA | {"quantization_config": W8A8}
    slab = cast(Any, SimpleNamespace(manifest=SimpleNamespace(config=config, is_opaque=False), data=memoryview(b"")))
    hooks = EngineHooks(lambda: None, lambda: None, lambda: None)
    with pytest.raises(LoadFailed, match="only the engine torchrelay computes these weights"):
        VllmEngine(settings).load(slab, hooks)


async def test_a_parameter_that_no_tensor_of_the_pack_fills_ends_the_load(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack is of plain weights, and vLLM's config declares scales: their parameters would keep any old numbers."""
    quantized = {"quantization_config": dict(FORMATS["fp8-channels"].config)}
    monkeypatch.setattr(served_model, "model_document", lambda config: model_document(config) | quantized)
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", dtype="bfloat16", head_dim=32)
    async with loading(tmp_path, checkpoint, nats_url) as worker:
        slot = worker.worker.slot
        await eventually(lambda: slot.state == FREE and slot.error, "the end of the load")
        assert "the pack has no tensor for 'model.layers.0.self_attn.qkv_proj.weight_scale'" in slot.error

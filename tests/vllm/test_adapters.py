"""LoRA adapters of a model that vLLM alone computes: they answer as PEFT's, and vLLM refuses them by its own reason."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from tests.integration.roles_testbed import Request, RolesTestbed, running_testbed
from tests.support.adapters import ATTENTION, make_adapter, with_adapter
from tests.support.checkpoints import greedy_reference, make_checkpoint
from tests.unit.param_store.running_store import publish, running_store
from tests.vllm.test_quantized import NUM_TOKENS, PROMPTS
from torchrelay.common.host.machine import SHARED_MEMORY
from torchrelay.control.v1 import param_store_pb2, types_pb2


def adapted(scene: RolesTestbed, prompt: list[int], adapter: param_store_pb2.VersionDescription | None) -> Request:
    request = scene.request(prompt, max_tokens=NUM_TOKENS)
    if adapter is not None:
        files = adapter.file_digests
        of_request = types_pb2.Adapter(
            adapter_id=adapter.version_id,
            config_digest=files["adapter_config.json"],
            weights_digest=files["adapter_model.safetensors"],
        )
        request.start.adapter.CopyFrom(of_request)
    return request


async def test_adapters_answer_as_peft_beside_their_base(tmp_path: Path, nats_url: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "glm4", num_attention_heads=4, hidden_size=128)
    reference: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    folders = [make_adapter(tmp_path / f"a{seed}", reference, targets=ATTENTION, seed=seed) for seed in range(2)]
    folders.append(make_adapter(tmp_path / "wide", reference, targets=ATTENTION, rank=32))
    async with running_store(tmp_path / "published") as store:
        base = await publish(store, checkpoint)
        adapters = [await publish(store, folder, base.version_id) for folder in folders]
    assert {adapter.engine for adapter in adapters} == {"vllm"}
    remote = tmp_path / "published" / "remote"
    models = [reference, *(with_adapter(reference, folder) for folder in folders[:2])]
    async with running_testbed(
        tmp_path, remote, base, nats_url, apart=False, engine="vllm", kv_pool_bytes=8 << 20, max_adapter_rank=16
    ) as scene:
        pairs = [
            (adapted(scene, prompt, adapter), greedy_reference(model, prompt, NUM_TOKENS))
            for prompt in PROMPTS[:2]
            for adapter, model in zip((None, *adapters[:2]), models, strict=True)
        ]
        for request, _ in pairs:
            await scene.send(request)
        for request, expected in pairs:
            await request.finished()
            assert request.tokens() == expected
        refused = await scene.send(adapted(scene, PROMPTS[0], adapters[2]))
        await refused.finished()
        assert (
            "vLLM does not serve this adapter: LoRA rank 32 is greater than max_lora_rank 16" in refused.error().message
        )
        await scene.assert_idle()
        await scene.prefill.unload()
        await scene.prefill.until_free()
        gc.collect()
        assert not list(SHARED_MEMORY.glob("torchrelay-adapter-*"))


async def test_slots_without_a_rank_refuse_adapters_by_the_setting(tmp_path: Path, nats_url: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "glm4", num_attention_heads=4, hidden_size=128)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    async with running_store(tmp_path / "published") as store:
        base = await publish(store, checkpoint)
        adapter = await publish(store, make_adapter(tmp_path / "adapter", reference), base.version_id)
    remote = tmp_path / "published" / "remote"
    stale = SHARED_MEMORY / "torchrelay-adapter-of-a-killed-worker"
    stale.mkdir()
    async with running_testbed(
        tmp_path, remote, base, nats_url, apart=False, engine="vllm", kv_pool_bytes=8 << 20
    ) as scene:
        assert not stale.exists()
        refused = await scene.send(adapted(scene, PROMPTS[0], adapter))
        await refused.finished()
        assert "serve adapters up to max_adapter_rank, which is 0 here" in refused.error().message
        await scene.assert_idle()

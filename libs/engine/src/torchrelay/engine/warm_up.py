"""Warm-up of a process before its slot is offered, so that the first request does not pay for it."""

from __future__ import annotations

from typing import Any, Final

import torch

from torchrelay.engine.core import ChoiceSpec, GroupSpec, KvBlock, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, tensors_by_segment
from torchrelay.transfer.manifest import Manifest
from torchrelay.transfer.pack_layout import PackLayout

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}


def warm_up(pool: KvPool) -> None:
    """Runs a model of zeros in every dtype through everything that a request uses: threads, kernels and lazy imports.

    Also faults the pool in. Call it on the computing thread; ``pool`` must be unused and have a few MB.
    """
    if pool.device.type == "cuda":
        torch.cuda.set_device(pool.device)  # per thread: kernels are launched on it
    torch.set_float32_matmul_precision("highest")  # TF32 would round the weights of fp32 packs, and change tokens
    pool.fault_in()
    for dtype in DTYPE_BYTES:
        manifest = zeros_manifest(dtype)
        instance = Instance(manifest, memoryview(bytes(manifest.num_bytes)), pool, token_budget=48)
        for segment in range(len(manifest.segments)):
            instance.segment_ready(segment)
        for number, temperature in enumerate((0.0, 1.0)):
            sampling = SamplingParams(temperature=temperature, top_p=0.9, top_k=8, max_tokens=4)
            group = GroupSpec(f"warm/{number}", (1,) * 40, 40, sampling, (ChoiceSpec(0), ChoiceSpec(1)))
            instance.prefill(group)
        handed_over = GroupSpec("warm/2", (1,) * 40, 40, SamplingParams(temperature=0, max_tokens=4), (ChoiceSpec(0),))
        blocks: list[tuple[int, bytes]] = []

        def copy_out(block: KvBlock, blocks: list[tuple[int, bytes]] = blocks) -> None:
            blocks.append((block.index, bytes(block.data)))

        instance.prefill(handed_over, copy_out)
        while instance.has_work():
            instance.step()
        kv_import = instance.import_kv(handed_over, instance.kv_layout(handed_over))
        for index, data in blocks:
            kv_import.write(index, data)
        kv_import.start({0: 1})
        while instance.has_work():
            instance.step()
        instance.close()


def zeros_manifest(dtype: str) -> Manifest:
    return PackLayout.of(tensors_by_segment(read_config(_CONFIG)), dtype).local_manifest(_CONFIG)

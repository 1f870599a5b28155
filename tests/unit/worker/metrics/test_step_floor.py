"""The least time of decode steps, by what they read."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.common.latency.latency_model import StepWork
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.sizing.footprint import footprint_of_bytes
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.transfer.manifest import Manifest
from torchrelay.transfer.pack_layout import PackLayout
from torchrelay.worker.metrics.step_floor import StepFloor

RATE = 1e6
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
EMBEDDING_BYTES = 256 * 64 * 2
MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
EXPERTS_BYTES = 2 * 8 * 3 * 32 * 64 * 2


def manifest_of(document: dict[str, Any]) -> Manifest:
    return PackLayout.of(tensors_by_segment(read_config(document)), "BF16").local_manifest(document)


def floor_of(document: dict[str, Any]) -> StepFloor:
    floor = StepFloor.of(manifest_of(document), RATE)
    assert floor is not None
    return floor


def tensor_bytes(document: dict[str, Any]) -> int:
    return sum(tensor.num_bytes for tensor in manifest_of(document).tensors)


def test_an_unknown_rate_gives_no_floor() -> None:
    assert StepFloor.of(manifest_of(DENSE), 0.0) is None


def test_embeddings_are_read_if_they_are_the_head() -> None:
    one = StepWork(num_decoding=1)
    assert floor_of(DENSE).seconds(one) == pytest.approx((tensor_bytes(DENSE) - EMBEDDING_BYTES) / RATE, rel=0.02)
    tied = DENSE | {"tie_word_embeddings": True}
    assert floor_of(tied).seconds(one) == pytest.approx(tensor_bytes(tied) / RATE, rel=0.02)


def test_attended_positions_are_read_as_far_as_windows_reach() -> None:
    def kv_s(document: dict[str, Any]) -> float:
        floor = floor_of(document)
        attending = StepWork(num_decoding=2, num_decode_attended=200)
        return floor.seconds(attending) - floor.seconds(StepWork(num_decoding=2))

    position_bytes = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, width, bf16
    assert kv_s(DENSE) == pytest.approx(200 * position_bytes / RATE)
    windowed = DENSE | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    assert kv_s(windowed) == pytest.approx(2 * 64 * position_bytes / RATE)


def test_a_batch_reads_the_experts_that_its_tokens_choose() -> None:
    floor, others = floor_of(MOE), tensor_bytes(MOE) - EMBEDDING_BYTES - EXPERTS_BYTES
    assert floor.seconds(StepWork(num_decoding=1)) == pytest.approx((others + EXPERTS_BYTES / 4) / RATE, rel=0.02)
    assert floor.seconds(StepWork(num_decoding=64)) == pytest.approx((others + EXPERTS_BYTES) / RATE, rel=0.02)


def test_only_decode_steps_near_the_floor_are_bound_by_memory() -> None:
    floor, work = StepFloor(footprint_of_bytes(10**6, 2, 0.0, 512), RATE), StepWork(num_decoding=4)
    assert floor.is_bound_by_memory(work, 1.49) and not floor.is_bound_by_memory(work, 1.51)
    assert not floor.is_bound_by_memory(StepWork(num_prefilled=8, num_decoding=4), 1.0)
    assert not floor.is_bound_by_memory(StepWork(), 1.0)

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.engine.harness import ModelOf, group_of, outputs, prompt_of, run
from torchrelay.common.errors import DataCorrupted
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.engine.weights.segment_gate import SegmentGate
from torchrelay.modelspec.config import read_config
from torchrelay.transfer.manifest import Manifest


@pytest.fixture
def mapped(model_of: ModelOf, tmp_path: Path) -> Iterator[tuple[Manifest, mmap.mmap]]:
    """A pack as a worker has it: a file mapped read-only, where any write would kill the process."""
    pack = model_of("qwen3").pack
    path = tmp_path / "pack"
    path.write_bytes(pack.data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        yield pack.manifest, mapping


def test_weights_are_views_of_mapping(mapped: tuple[Manifest, mmap.mmap], model_of: ModelOf) -> None:
    manifest, mapping = mapped
    config = read_config(manifest.config)
    weights = PackWeights(manifest, config, memoryview(mapping), link=None)
    for segment in range(config.num_segments):
        weights.load(segment)
    base = weights.embedding().data_ptr() - manifest.tensors[0].offset
    for layer in range(config.num_layers):
        for tensor in (weights.layer(layer).qkv, weights.layer(layer).gate_up, weights.layer(layer).down):
            assert isinstance(tensor, torch.Tensor)
            assert base <= tensor.data_ptr() < base + manifest.num_bytes
    own = model_of("qwen3").reference.model.layers[1]
    fused = torch.cat([own.self_attn.q_proj.weight, own.self_attn.k_proj.weight, own.self_attn.v_proj.weight])
    qkv, gate_up = weights.layer(1).qkv, weights.layer(1).gate_up
    assert isinstance(qkv, torch.Tensor) and isinstance(gate_up, torch.Tensor)
    assert torch.equal(qkv, fused)
    assert torch.equal(gate_up, torch.cat([own.mlp.gate_proj.weight, own.mlp.up_proj.weight]))
    weights.close()


def test_instance_runs_on_and_releases_read_only_mapping(mapped: tuple[Manifest, mmap.mmap], model_of: ModelOf) -> None:
    manifest, mapping = mapped
    view = memoryview(mapping)
    instance = Instance(manifest, view, KvPool(1 << 20))
    for segment in range(len(manifest.segments)):
        instance.segment_ready(segment)
    instance.prefill(group_of(prompt_of(9)))
    assert outputs(run(instance))["r/0", 0] == model_of("qwen3").expected(prompt_of(9))
    instance.close()
    view.release()
    mapping.close()  # raises BufferError as long as a tensor views it


def test_tensor_of_wrong_shape_is_refused(model_of: ModelOf) -> None:
    pack = model_of().pack
    wrong = [entry._replace(shape=(1, *entry.shape)) for entry in pack.manifest.tensors]
    manifest = replace(pack.manifest, tensors=tuple(wrong))
    instance = Instance(manifest, pack.view, KvPool(1 << 20))
    with pytest.raises(DataCorrupted, match=r"no model\.embed_tokens\.weight of shape \[320, 64\]"):
        instance.segment_ready(0)
    assert instance.num_segments_ready == 0


def test_non_contiguous_tensor_group_is_refused(model_of: ModelOf) -> None:
    pack = model_of().pack
    moved = [
        entry._replace(offset=entry.offset + 64) if "v_proj" in entry.name else entry for entry in pack.manifest.tensors
    ]
    manifest = replace(pack.manifest, tensors=tuple(moved))
    with pytest.raises(DataCorrupted, match="must be contiguous"):
        Instance(manifest, pack.view, KvPool(1 << 20)).segment_ready(1)


def test_gate_counts_segment_once() -> None:
    gate = SegmentGate(3)
    gate.open(1)
    gate.open(1)
    assert gate.num_open == 1
    assert [gate.is_open(i) for i in range(3)] == [False, True, False]

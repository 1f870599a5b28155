"""The text part of multimodal checkpoints is packed and answers as transformers does without images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import MULTIMODAL, greedy_reference, make_multimodal_checkpoint, reference_model
from tests.unit.engine.harness import GREEDY, POOL_BYTES, group_of, outputs, prompt_of, run
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.param_store.model_files import eos_token_ids
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.transfer.manifest import Manifest, decode_manifest

WEIGHTS = "model.safetensors"


def packed(folder: Path) -> tuple[Manifest, bytes]:
    pack_path = folder.with_suffix(".pack")
    pack(folder, pack_path, 0)
    return decode_manifest(pack_path.with_suffix(".manifest").read_bytes()), pack_path.read_bytes()


def assert_as_transformers(folder: Path, reference: Any) -> None:
    manifest, data = packed(folder)
    assert not [tensor.name for tensor in manifest.tensors if "vision" in tensor.name or "visual" in tensor.name]
    instance = Instance(manifest, memoryview(data), KvPool(POOL_BYTES, "cpu"))
    for segment in range(len(manifest.segments)):
        instance.segment_ready(segment)
    for length in (1, 17, 70):
        prompt = prompt_of(length)
        instance.prefill(group_of(prompt))
        expected = greedy_reference(reference, list(prompt), GREEDY.max_tokens)
        assert outputs(run(instance)) == {("r/0", 0): expected}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_answers_equal_transformers_without_images(tmp_path: Path, name: str) -> None:
    folder = make_multimodal_checkpoint(tmp_path / "model", name)
    reference = reference_model(folder, "AutoModelForImageTextToText")
    assert_as_transformers(folder, reference)
    config = json.loads((folder / "config.json").read_text())
    assert eos_token_ids(lambda file: None, config) == [257]


def test_flat_config_of_early_qwen_is_read(tmp_path: Path) -> None:
    folder = make_multimodal_checkpoint(tmp_path / "model", "qwen2.5-vl")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (folder / "config.json").write_text(json.dumps(text | config))
    assert_as_transformers(folder, reference_model(folder, "AutoModelForImageTextToText"))

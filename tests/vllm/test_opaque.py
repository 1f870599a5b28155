"""Architectures that vLLM alone computes: it takes their tensors from the arena, and answers as from the files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.roles_testbed import running_testbed
from tests.support.checkpoints import (
    OPAQUE_FAMILIES,
    OPAQUE_MULTIMODAL,
    make_checkpoint,
    make_multimodal_checkpoint,
)
from tests.unit.param_store.running_store import publish, running_store
from tests.vllm.test_quantized import NUM_TOKENS, PROMPTS, vllm_alone
from torchrelay.modelspec.opaque import known_models


def opaque_checkpoint(folder: Path, family: str) -> Path:
    if family in OPAQUE_MULTIMODAL:
        return make_multimodal_checkpoint(folder, family)
    return make_checkpoint(folder, family, num_attention_heads=4, hidden_size=128)


@pytest.mark.parametrize("family", sorted({*OPAQUE_FAMILIES, *OPAQUE_MULTIMODAL}))
async def test_answers_equal_those_of_vllm_with_the_files(tmp_path: Path, nats_url: str, family: str) -> None:
    checkpoint = opaque_checkpoint(tmp_path / "model", family)
    expected = await vllm_alone(checkpoint)
    async with running_store(tmp_path / "published") as store:
        description = await publish(store, checkpoint)
    assert description.engine == "vllm"
    remote = tmp_path / "published" / "remote"
    settings: dict[str, Any] = {"apart": False, "engine": "vllm", "kv_pool_bytes": 8 << 20}
    async with running_testbed(tmp_path, remote, description, nats_url, **settings) as scene:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            request = scene.request(prompt, max_tokens=NUM_TOKENS)
            await (await scene.send(request)).finished()
            assert request.tokens() == tokens
        await scene.assert_idle()


def test_the_list_of_architectures_is_that_of_the_installed_vllm() -> None:
    # In a process of its own: to import every model changes what the later tests run with.
    command = "import json; from tools.vllm_models import models_document; print(json.dumps(models_document()))"
    answer = subprocess.run((sys.executable, "-c", command), stdout=subprocess.PIPE, check=True)
    document, known = json.loads(answer.stdout.splitlines()[-1]), known_models()
    groups = {name: frozenset(value) if isinstance(value, list) else value for name, value in document.items()}
    assert asdict(known) == groups

"""Embeddings and scores of models that vLLM alone computes, equal to those of vLLM with the files."""

from __future__ import annotations

import asyncio
import json
import math
import struct
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.roles_testbed import Request, RolesTestbed, running_testbed
from tests.support.checkpoints import declare_embeddings, make_checkpoint, make_encoder
from tests.unit.param_store.running_store import publish, running_store
from torchrelay.common.tokens.tokenizer import load_tokenizer
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.vllm.served_model import VllmModel

SETTINGS: dict[str, Any] = {"apart": False, "engine": "vllm", "kv_pool_bytes": 8 << 20, "token_budget": 600}
PROMPTS = [[(7 * salt + 3 * index) % 100 for index in range(length)] for salt, length in enumerate((1, 33, 64, 700))]
EMBEDDERS = {  # pooling and normalization
    "ModernBertModel": ("mean_tokens", types_pb2.POOLING_MEAN, True),
    "ModernBertModel-cls": ("cls_token", types_pb2.POOLING_FIRST_TOKEN, False),
    "glm4": ("lasttoken", types_pb2.POOLING_LAST_TOKEN, True),
}
QUERY, DOCUMENTS = "what is a relay", ["a relay pass weights", "two hosts", "relays relays relays of two weights"]
LONG: dict[str, Any] = {"max_position_embeddings": 1024}
SIZES: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 128}
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
RERANKERS: dict[str, dict[str, Any]] = {  # with more of config.json
    "BertForSequenceClassification": {},
    "BertForSequenceClassification-untyped": {},
    "XLMRobertaForSequenceClassification": IDENTITY,
    "ModernBertForSequenceClassification": {},
    "Qwen3ForSequenceClassification": {"num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0},
}


async def vllm_alone(*arguments: str) -> Any:
    """The answer of vLLM when it reads the files itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.vllm.pooled_values", *arguments, stdout=PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


async def pooled(scene: RolesTestbed, prompt: Sequence[int], pooling: int, second_text: int = 0) -> Request:
    """An attempt that ends with a vector, sent to the worker."""
    request = scene.request(prompt, max_tokens=0)
    request.start.instance_id, request.start.pooling = scene.prefill.instance_id, pooling  # type: ignore[assignment]
    request.start.second_text = second_text
    await request.streams[0].send(request.start)
    return request


def values(request: Request) -> list[float]:
    last = request.outputs()[-1]
    assert (last.finish_reason, last.num_prompt_tokens) == (pb.FINISH_REASON_STOP, len(request.start.prompt))
    return list(struct.unpack(f"<{len(last.embedding) // 4}f", last.embedding))


def max_step_tokens(scene: RolesTestbed) -> int:
    instance = scene.prefill.worker.engine.instance
    assert isinstance(instance, VllmModel) and instance._vllm is not None
    return int(instance._vllm.vllm_config.scheduler_config.max_num_batched_tokens)


@pytest.mark.parametrize("name", EMBEDDERS)
async def test_vectors_equal_those_of_vllm_with_the_files(tmp_path: Path, nats_url: str, name: str) -> None:
    mode, pooling, is_normalized = EMBEDDERS[name]
    if name == "glm4":
        checkpoint = make_checkpoint(tmp_path / "model", name, **SIZES, **LONG)
    else:
        checkpoint = make_encoder(tmp_path / "model", name.partition("-")[0], **SIZES, **LONG)
    declare_embeddings(checkpoint, 128, mode=mode, is_normalized=is_normalized)
    expected = await vllm_alone(str(checkpoint), json.dumps(PROMPTS))
    async with running_store(tmp_path / "published") as store:
        description = await publish(store, checkpoint)
    assert (description.engine, description.has_no_head) == ("vllm", True)
    assert description.embedding == type(description.embedding)(
        pooling=pooling,
        num_dimensions=128,
        is_normalized=is_normalized,
    )
    async with running_testbed(tmp_path, tmp_path / "published" / "remote", description, nats_url, **SETTINGS) as scene:
        requests = [await pooled(scene, prompt, pooling) for prompt in PROMPTS]
        for request, vector in zip(requests, expected, strict=True):
            await request.finished()
            given = values(request)
            length = math.hypot(*given) if is_normalized else 1.0
            assert [value / length for value in given] == pytest.approx(vector, abs=1e-5)
        # The budget where vLLM computes a prompt in chunks, and otherwise the longest prompt.
        assert max_step_tokens(scene) == (600 if name == "glm4" else 1024)
        tokens = await scene.send(scene.request(PROMPTS[1]))
        await tokens.finished()
        assert "pooling of this model" in tokens.error().message
        await tokens.cancel()
        await scene.assert_idle()


@pytest.mark.parametrize("name", RERANKERS)
async def test_scores_equal_those_of_vllm_with_the_files(tmp_path: Path, nats_url: str, name: str) -> None:
    checkpoint = make_encoder(tmp_path / "model", name.partition("-")[0], num_labels=1, **SIZES, **RERANKERS[name])
    is_typed = name == "BertForSequenceClassification"
    if is_typed:  # transformers has 2 by default
        path = checkpoint / "config.json"
        document = json.loads(path.read_text())
        assert document.pop("type_vocab_size") == 2
        path.write_text(json.dumps(document))
    path = checkpoint / "tokenizer_config.json"
    inputs = {"model_input_names": ["input_ids", *(["token_type_ids"] if is_typed else [])]}
    path.write_text(json.dumps(json.loads(path.read_text()) | inputs))
    expected = await vllm_alone(str(checkpoint), json.dumps([QUERY, DOCUMENTS]), "score")
    async with running_store(tmp_path / "published") as store:
        description = await publish(store, checkpoint)
    assert (description.engine, description.has_no_head) == ("vllm", True)
    assert description.embedding.pooling == types_pb2.POOLING_SCORE
    tokenizer = load_tokenizer((checkpoint / "tokenizer.json").read_bytes())
    async with running_testbed(tmp_path, tmp_path / "published" / "remote", description, nats_url, **SETTINGS) as scene:
        encodings = [tokenizer.encode(QUERY, document) for document in DOCUMENTS]
        requests = [
            await pooled(scene, each.ids, types_pb2.POOLING_SCORE, each.type_ids.index(1)) for each in encodings
        ]
        for request, score in zip(requests, expected, strict=True):
            await request.finished()
            assert values(request) == pytest.approx([score], abs=1e-5)
        if is_typed:
            untyped = await pooled(scene, encodings[0].ids, types_pb2.POOLING_SCORE)
            await untyped.finished()
            assert values(untyped) != pytest.approx(expected[:1], abs=1e-5)
        await scene.assert_idle()

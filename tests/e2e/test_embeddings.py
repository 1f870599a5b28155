"""Embeddings through the whole platform: woken from zero, equal to transformers, billed by the tokens of the inputs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.e2e.conftest import SMALL, Tenant
from tests.support.checkpoints import (
    WORDS,
    declare_embeddings,
    encoder_states,
    make_checkpoint,
    make_encoder,
    make_headless,
    reference_model,
)
from tests.support.completions import headers
from tests.support.http import http
from tests.support.platform import Platform, running_platform

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its head, for the reference."""
    return make_checkpoint(tmp_path_factory.mktemp("whole"), "qwen3")


@pytest.fixture(scope="module")
def folder(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as sentence-transformers saves it: without its head."""
    copy = shutil.copytree(whole, tmp_path_factory.mktemp("embed") / "model")
    return declare_embeddings(make_headless(copy))


@torch.no_grad()
def reference(model: Any, prompt: Sequence[int]) -> list[float]:
    states = model.model(torch.tensor([list(prompt)])).last_hidden_state[0, -1]
    vector: list[float] = (states / states.norm()).tolist()
    return vector


def client_of(platform: Platform, key: str) -> openai.OpenAI:
    return openai.OpenAI(api_key=key, base_url=f"{platform.http}/v1", max_retries=0, timeout=60)


def usage(tenant: Tenant) -> tuple[int, int]:
    total = http.get(f"{tenant.platform.http}/v1/usage", headers=headers(tenant.key)).json()["total"]
    return total["prompt_tokens"], total["completion_tokens"]


def test_vectors_and_bill_of_many_inputs(platform: Platform, tenant: Tenant, folder: Path, whole: Path) -> None:
    model = platform.upload(tenant.key, folder, "embed")
    platform.await_zero()
    prompts = [[(7 * place + number) % 251 for place in range(1 + 9 * number)] for number in range(50)]
    before = usage(tenant)
    client = client_of(platform, tenant.key)
    reply = client.embeddings.create(model=model, input=prompts)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, prompts))
    after = usage(tenant)
    assert (after[0] - before[0], after[1] - before[1]) == (sum(map(len, prompts)), 0)
    checkpoint = reference_model(whole)
    for prompt, given in zip(prompts, reply.data, strict=True):
        assert given.embedding == pytest.approx(reference(checkpoint, prompt), abs=TOLERANCE)
    text = client.embeddings.create(model=model, input="some words", dimensions=16)
    assert (len(text.data[0].embedding), text.usage.prompt_tokens) == (16, len("some words"))
    plain = tenant.model("qwen3")
    with pytest.raises(openai.BadRequestError, match="declares no embeddings"):
        client.embeddings.create(model=plain, input="some words")
    with pytest.raises(openai.BadRequestError, match="has no head for tokens"):
        client.completions.create(model=model, prompt="some words")


def test_encoder_as_sentence_transformers_users_upload_it(platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    """Texts get the tokenizer's [CLS] and [SEP], and are neither padded nor cut, whatever tokenizer.json says."""
    folder = declare_embeddings(make_encoder(tmp_path / "bert"), mode="mean_tokens")
    model = platform.upload(tenant.key, folder, "bert")
    platform.await_zero()
    texts = {
        "what is a relay": [WORDS.index(word) for word in ("[CLS]", "what", "is", "a", "relay", "[SEP]")],
        "a relays unheard": [WORDS.index(word) for word in ("[CLS]", "a", "relay", "##s", "[UNK]", "[SEP]")],
        " ".join(["hosts"] * 98): [WORDS.index(word) for word in ("[CLS]", *["hosts"] * 98, "[SEP]")],
    }
    client, before = client_of(platform, tenant.key), usage(tenant)
    reply = client.embeddings.create(model=model, input=list(texts))
    assert reply.usage.prompt_tokens == 6 + 6 + 100
    assert usage(tenant) == (before[0] + 112, before[1])
    for prompt, given in zip(texts.values(), reply.data, strict=True):
        mean = encoder_states(folder, prompt).mean(0)
        assert given.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=TOLERANCE)
    with pytest.raises(openai.BadRequestError, match="101"):
        client.embeddings.create(model=model, input=" ".join(["hosts"] * 99))
    with pytest.raises(openai.BadRequestError, match="has no head for tokens"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}])


def test_killed_worker_costs_no_vector(tmp_path: Path, folder: Path, whole: Path) -> None:
    """The inputs that it had are computed elsewhere, or by its successor."""
    with running_platform(tmp_path / "home", (*SMALL, "--idle-timeout-s", "120")) as platform:
        tenant = Tenant(platform, "acme", platform.tenant("acme"), tmp_path)
        model = platform.upload(tenant.key, folder, "embed")
        client = client_of(platform, tenant.key)
        prompts = [[(11 * place + number) % 251 for place in range(300)] for number in range(120)]
        client.embeddings.create(model=model, input=prompts[0])
        before = usage(tenant)
        worker = next(
            name
            for name in ("prefill-0", "decode-0")
            for instance in next(platform.views()).instances
            if instance.worker_id == name and 1 in instance.roles
        )
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(client.embeddings.create, model=model, input=prompts)
            for view in platform.views():
                if any(instance.num_running for instance in view.instances):
                    break
            platform.kill(worker)
            reply = asking.result()
        checkpoint = reference_model(whole)
        for prompt, given in zip(prompts, reply.data, strict=True):
            assert given.embedding == pytest.approx(reference(checkpoint, prompt), abs=TOLERANCE)
        assert usage(tenant) == (before[0] + sum(map(len, prompts)), before[1])

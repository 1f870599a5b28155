"""Embeddings through the whole platform: woken from zero, equal to transformers, billed by the tokens of the inputs."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.e2e.embeddings import client_of, make_embedder, vector
from tests.e2e.tenants import Tenant
from tests.support.checkpoints import (
    WORDS,
    declare_embeddings,
    encoder_states,
    make_encoder,
    reference_model,
)
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-5


def test_vectors_and_bill_of_many_inputs(platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    folder, whole = make_embedder(tmp_path)
    model = platform.upload(tenant.key, folder, "embed")
    platform.await_zero()
    prompts = [[(7 * place + number) % 251 for place in range(1 + 9 * number)] for number in range(50)]
    before = tenant.usage()
    client = client_of(platform, tenant.key)
    reply = client.embeddings.create(model=model, input=prompts)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, prompts))
    after = tenant.usage()
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(map(len, prompts))
    assert after["completion_tokens"] == before["completion_tokens"]
    checkpoint = reference_model(whole)
    for prompt, given in zip(prompts, reply.data, strict=True):
        assert given.embedding == pytest.approx(vector(checkpoint, prompt), abs=TOLERANCE)
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
    client, before = client_of(platform, tenant.key), tenant.usage()
    reply = client.embeddings.create(model=model, input=list(texts))
    assert reply.usage.prompt_tokens == 6 + 6 + 100
    after = tenant.usage()
    assert after["prompt_tokens"] == before["prompt_tokens"] + 112
    assert after["completion_tokens"] == before["completion_tokens"]
    for prompt, given in zip(texts.values(), reply.data, strict=True):
        mean = encoder_states(folder, prompt).mean(0)
        assert given.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=TOLERANCE)
    with pytest.raises(openai.BadRequestError, match="101"):
        client.embeddings.create(model=model, input=" ".join(["hosts"] * 99))
    with pytest.raises(openai.BadRequestError, match="has no head for tokens"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}])

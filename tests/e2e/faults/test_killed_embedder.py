"""A worker that is killed while it computes embeddings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.embeddings import client_of, make_embedder, vector
from tests.e2e.tenants import Tenant
from tests.support.checkpoints import reference_model

pytestmark = pytest.mark.e2e


def test_killed_worker_costs_no_vector(shaken: Tenant, tmp_path: Path) -> None:
    """The inputs that it had are computed elsewhere, or by its successor."""
    platform, (folder, whole) = shaken.platform, make_embedder(tmp_path)
    model = platform.upload(shaken.key, folder, "embed")
    client = client_of(platform, shaken.key)
    prompts = [[(11 * place + number) % 251 for place in range(300)] for number in range(120)]
    client.embeddings.create(model=model, input=prompts[0])
    before = shaken.usage()
    worker = next(
        instance.worker_id
        for instance in next(platform.views()).instances
        if instance.model == model and 1 in instance.roles
    )
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.embeddings.create, model=model, input=prompts)
        for view in platform.views():
            if any(instance.num_running for instance in view.instances if instance.model == model):
                break
        platform.kill(worker)
        reply = asking.result()
    checkpoint = reference_model(whole)
    for prompt, given in zip(prompts, reply.data, strict=True):
        assert given.embedding == pytest.approx(vector(checkpoint, prompt), abs=1e-5)
    after = shaken.usage()
    assert after["prompt_tokens"] == before["prompt_tokens"] + sum(map(len, prompts))
    assert after["completion_tokens"] == before["completion_tokens"]

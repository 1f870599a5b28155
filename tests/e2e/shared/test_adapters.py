"""LoRA adapters as models, through the whole platform: answers are PEFT's, the instances are the base's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tenants import Tenant
from tests.support.adapters import ATTENTION, make_adapter, with_adapter
from tests.support.checkpoints import greedy_reference, make_checkpoint, reference_model
from tests.support.completions import complete, headers
from tests.support.http import http
from torchrelay.cli.errors import ApiError

pytestmark = pytest.mark.e2e
NUM_TOKENS = 12


def call(tenant: Tenant, model: str, prompt: list[int]) -> dict[str, Any]:
    return complete(tenant.platform, tenant.key, model, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_adapters_answer_as_models_on_the_instances_of_their_base(tenant: Tenant, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "qwen3", seed=77)  # no other model has its version
    base = tenant.platform.upload(tenant.key, folder, "base")
    reference, prompt = reference_model(folder), list(range(40))
    models, expected = [base], {base: greedy_reference(reference, prompt, NUM_TOKENS)}
    with tenant.platform.admin() as admin:  # before the gateway knows the model with another price
        price = {"model": "acme/adapter-0", "prompt_nano": 1000, "cached_nano": 1000, "output_nano": 0}
        admin.call("PUT", "/v1/prices", json=price)
    for number in range(2):
        adapter = make_adapter(tmp_path / f"adapter-{number}", reference, seed=number, targets=ATTENTION, rank=8)
        name = tenant.platform.upload(tenant.key, adapter, f"adapter-{number}", base="base")
        models.append(name)
        expected[name] = greedy_reference(with_adapter(reference, adapter), prompt, NUM_TOKENS)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda model: call(tenant, model, prompt), models * 2))
    for model, answer in zip(models * 2, answers, strict=True):
        assert answer["model"] == model
        assert answer["choices"][0]["token_ids"] == expected[model]

    listed = http.get(f"{tenant.platform.http}/v1/models", headers=headers(tenant.key)).json()["data"]
    relations = {model["id"]: (model["root"], model["parent"]) for model in listed if model["id"] in models}
    assert relations == {base: (base, None), models[1]: (base, base), models[2]: (base, base)}
    view = next(tenant.platform.views())
    assert len({instance.version_id for instance in view.instances if instance.model in models}) == 1

    usage_url = f"{tenant.platform.http}/v1/usage?model={models[1]}"
    assert http.get(usage_url, headers=headers(tenant.key)).json()["total"]["cost_nano"] == 2 * len(prompt) * 1000
    tenant_url = f"{tenant.platform.http}/v1/models/{base}"
    refused = http.delete(tenant_url, headers=headers(tenant.key))
    assert refused.status_code == 409 and "adapter-0, adapter-1" in refused.text
    for model in (*models[1:], base):
        assert http.delete(f"{tenant.platform.http}/v1/models/{model}", headers=headers(tenant.key)).status_code == 200


def test_an_adapter_that_does_not_fit_its_base_is_refused(tenant: Tenant, tmp_path: Path) -> None:
    reference = reference_model(tenant.checkpoint("llama"))
    base = tenant.model("llama")
    adapter = make_adapter(tmp_path / "adapter", reference, use_dora=True)
    with pytest.raises(ApiError, match=r"adapter_config.json: use_dora: True is not supported"):
        tenant.platform.upload(tenant.key, adapter, "refused", base=base)
    make_adapter(adapter, reference)
    with pytest.raises(ApiError, match="nowhere' does not exist"):
        tenant.platform.upload(tenant.key, adapter, "refused", base="nowhere")

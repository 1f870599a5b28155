"""A model is rolled back to a version that it replaced, without an upload, and answers as before."""

from __future__ import annotations

import pytest

from tests.e2e.tenants import Tenant
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e


def test_rolled_back_model_answers_as_before(platform: Platform, tenant: Tenant) -> None:
    def run(*words: str) -> str:
        return platform.cli(*words, "--key", tenant.key)

    def answer(model: str) -> list[int]:
        reply = complete(platform, tenant.key, model, [5, 6, 7], max_tokens=8, ignore_eos=True)
        tokens: list[int] = reply["choices"][0]["token_ids"]
        return tokens

    model = platform.upload(tenant.key, tenant.checkpoint("llama"), "improved")
    first = answer(model)
    platform.upload(tenant.key, make_checkpoint(tenant.folder / "newer", "llama", seed=1), "improved")
    second = answer(model)
    assert second != first
    _, replaced = [line.split()[0] for line in run("models", "versions", model).splitlines()[3:5]]
    assert run("models", "rollback", model, replaced) == f"{model}: version {replaced} is current again\n"
    assert answer(model) == first
    run("models", "rollback", model)
    assert answer(model) == second

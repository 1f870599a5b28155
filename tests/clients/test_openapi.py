"""The description of the API at ``/openapi.json``, as schemathesis makes requests from it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.conftest import PROGRAMS, ROOT, SCRIPT, TEMPLATE, Clients, run
from tests.support.checkpoints import declare_embeddings, make_checkpoint, make_headless
from tests.support.scripted_checkpoints import make_scripted_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "missing_required_header",
    "ignored_auth",
)
OF_ADMINS = "/(tenants|prices|orphans|reconcile|keys|usage|bill)"
NUM_EXAMPLES = 10  # random ones for each operation, beside those that cover each field's values


def statuses(clients: Clients, key: str, folder: Path, *options: str) -> dict[str, set[int]]:
    """The statuses of every operation, by its method and path, after all checks have passed.

    The requests are the same in every run, ten times as fast as the limit on an idle machine.
    """
    command = (
        str(PROGRAMS / "st"),
        "run",
        f"{clients.platform.http}/openapi.json",
        *("--header", f"Authorization: Bearer {key}"),
        *("--phases", "coverage,fuzzing", "--max-examples", str(NUM_EXAMPLES), "--generation-deterministic"),
        *("--checks", ",".join(CHECKS), "--continue-on-failure", "--no-shrink"),
        *("--suppress-health-check", "too_slow"),  # which measures wall time
        *("--workers", "1", "--request-timeout", "120", "--warnings", "off", "--no-color"),
        *("--report", "ndjson", "--report-ndjson-path", str(folder / "report")),
        *options,
    )
    hooks = {"SCHEMATHESIS_HOOKS": "tests.clients.python.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
    run(command, clients.environment() | hooks, folder, limit_s=840)
    by_operation = defaultdict(set)
    for line in (folder / "report").read_text().splitlines():
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for interaction in recorder.get("interactions", {}).values():
            by_operation[recorder["label"]].add(interaction["response"]["status_code"])
    return by_operation


@pytest.fixture
def described(clients: Clients, tmp_path: Path) -> Clients:
    """A tenant whose models and keys change without harm to other tests."""
    platform = clients.platform
    key = platform.tenant("described")
    folder = make_scripted_checkpoint(tmp_path / "scripted", SCRIPT, TEMPLATE)
    embedding = declare_embeddings(make_headless(make_checkpoint(tmp_path / "embedding", "qwen3")))
    platform.upload(key, folder, "patched")
    models = platform.upload(key, folder, "scripted"), platform.upload(key, embedding, "embedding")
    return replace(clients, key=key, model=models[0], embedding_model=models[1])


def test_answers_to_tenants_are_described(described: Clients, tmp_path: Path) -> None:
    found = statuses(described, described.key, tmp_path)
    for path in ("chat/completions", "completions", "embeddings", "responses", "messages", "messages/count_tokens"):
        assert {200, 400, 405, 415} <= found[f"POST /v1/{path}"], path
    for operation in ("GET /v1/models", "PATCH /v1/models/{name}", "PUT /v1/models/{name}/aliases", "GET /v1/usage"):
        assert {200, 400} <= found[operation], operation
    assert len(found) > 30


def test_answers_to_administrators_are_described(clients: Clients, tmp_path: Path) -> None:
    key = clients.platform.home.admin_key()
    found = statuses(clients, key, tmp_path, "--include-path-regex", OF_ADMINS)
    assert 200 in found["PUT /v1/prices"]

"""Batches, as OpenAI's client sends them, whose gateway and workers are killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.e2e.embeddings import client_of, make_embedder
from tests.e2e.tenants import Tenant
from tests.support.completions import headers
from tests.support.http import http
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e
ENDED = {"completed", "failed", "expired", "cancelled"}


def lines_of(endpoint: str, bodies: Sequence[dict[str, Any]]) -> bytes:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def begun(client: openai.OpenAI, endpoint: Any, bodies: Sequence[dict[str, Any]]) -> Batch:
    file = client.files.create(file=("input.jsonl", lines_of(endpoint, bodies)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"run": "nightly"}
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    found: list[Batch] = []

    def has_ended() -> bool:
        try:
            found.append(client.batches.retrieve(batch.id))
        except (openai.APIConnectionError, openai.InternalServerError):  # the gateway starts again
            return False
        return found[-1].status in ENDED

    wait_until(has_ended, "the end of the batch")
    return found[-1]


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_batch_survives_killed_processes_and_costs_what_its_lines_say(shaken: Tenant) -> None:
    platform, model = shaken.platform, shaken.model()
    client = client_of(platform, shaken.key)
    prices = {"model": model, "service": "batch", "prompt_nano": 50, "cached_nano": 10, "output_nano": 200}
    with platform.admin() as admin:
        admin.call("PUT", "/v1/prices", json=prices)
    before = shaken.usage()
    lengths = [
        20 + 2 * number for number in range(60)
    ]  # different, so that lines are under way whenever a process ends
    bodies: list[dict[str, Any]] = [
        {"model": model, "prompt": [30 + number, 31, 32, 33], "max_tokens": length, "ignore_eos": True}
        for number, length in enumerate(lengths)
    ]
    bodies[7] = {"model": "no-such-model", "prompt": "x"}
    bodies[11]["stream"] = True
    batch = begun(client, "/v1/completions", bodies)
    for victim, num_done in (("gateway", 5), ("decode-0", 15), ("scheduler", 25)):

        def has_done(least: int = num_done) -> bool:
            try:
                counts = client.batches.retrieve(batch.id).request_counts
            except (openai.APIConnectionError, openai.InternalServerError):
                return False
            return counts is not None and counts.completed + counts.failed >= least

        wait_until(has_done, f"{num_done} lines")
        platform.await_restart(victim, platform.kill(victim))
    batch = ended(client, batch)
    assert batch.status == "completed" and batch.metadata == {"run": "nightly"}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (60, 58, 2)
    output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert [line["custom_id"] for line in output] == [f"line-{n}" for n in range(60) if n not in (7, 11)]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [
        ("line-7", 404),
        ("line-11", 400),
    ]
    usages = [line["response"]["body"]["usage"] for line in output]
    after = shaken.usage()
    cached = sum((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in usages)
    sums = {name: sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")}
    assert sums["completion_tokens"] == sum(lengths) - lengths[7] - lengths[11]
    assert {name: after[name] - before[name] for name in sums} == sums
    cost_nano = (sums["prompt_tokens"] - cached) * 50 + cached * 10 + sums["completion_tokens"] * 200
    assert after["cost_nano"] - before["cost_nano"] == cost_nano
    listed = http.get(f"{platform.http}/v1/requests?status=gateway_lost", headers=headers(shaken.key)).json()["data"]
    lost = [request for request in listed if request["opened_unix_us"] >= batch.created_at * 1_000_000]
    assert lost and not any(request["cost_nano"] for request in lost)
    with platform.admin() as admin:
        assert admin.call("GET", "/v1/reconcile")["faults"] == []
    client.files.delete(batch.input_file_id)
    assert batch.input_file_id not in {file.id for file in client.files.list(limit=2)}  # all pages


def test_command_runs_a_batch_of_chats(shaken: Tenant, tmp_path: Path) -> None:
    """With embeddings beside it, whose lines are one bill each."""
    platform, model = shaken.platform, shaken.model()
    client, key = client_of(platform, shaken.key), ("--key", shaken.key)
    embedder = platform.upload(shaken.key, make_embedder(tmp_path)[0], "batch-embed")
    before = shaken.usage()
    embedding = begun(client, "/v1/embeddings", [{"model": embedder, "input": [[1, 2, 3], [4, 5]]}] * 3)
    chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    (tmp_path / "input.jsonl").write_bytes(lines_of("/v1/chat/completions", [chat, {**chat, "max_tokens": "many"}]))
    words = ("batch", "create", str(tmp_path / "input.jsonl"), "--endpoint", "/v1/chat/completions", "--wait", "--json")
    batch = json.loads(platform.cli(*words, *key))
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    answers = [json.loads(line) for line in platform.cli("batch", "results", batch["id"], *key).splitlines()]
    [error] = map(json.loads, platform.cli("batch", "results", batch["id"], "--errors", *key).splitlines())
    assert error["custom_id"] == "line-1" and error["response"]["body"]["error"]["param"] == "max_tokens"
    assert batch["id"] in platform.cli("batch", "list", *key)
    done = ended(client, embedding)
    answers += results(client, done.output_file_id)
    assert len(answers) == 4 and len(answers[-1]["response"]["body"]["data"]) == 2
    after, usages = shaken.usage(), [answer["response"]["body"]["usage"] for answer in answers]
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)


def test_malformed_input_fails_and_a_cancelled_batch_keeps_its_results(shaken: Tenant) -> None:
    platform, model = shaken.platform, shaken.model()
    client = client_of(platform, shaken.key)
    body = {"model": model, "prompt": [30, 31], "max_tokens": 400, "ignore_eos": True}
    lines = lines_of("/v1/completions", [body, body]).replace(b"line-1", b"line-0") + b"{\n"
    file = client.files.create(file=("input.jsonl", lines), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = ended(client, batch)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [
        ("duplicate_custom_id", 2),
        ("invalid_json_line", 3),
    ]
    assert "failed" in platform.cli("batch", "show", batch.id, "--wait", "--key", shaken.key)
    before = shaken.usage()
    batch = begun(client, "/v1/completions", [body] * 200)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)

    def has_results() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 0

    wait_until(has_results, "the first results")
    assert "cancelling" in platform.cli("batch", "cancel", batch.id, "--key", shaken.key)
    batch = ended(client, batch)
    output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert batch.status == "cancelled" and output and len(output) + len(errors) == 200
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert {line["custom_id"] for line in output + errors} == {f"line-{number}" for number in range(200)}
    assert shaken.usage()["completion_tokens"] - before["completion_tokens"] == 400 * len(output)

"""Prefill and decode are two processes: KV crosses, and the prompt is never computed twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete, stream
from tests.support.platform import Platform
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e
PROMPT = list(range(40, 107))
NUM_TOKENS = 21


def test_decode_computes_its_own_positions_and_receives_the_kv_bytes(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model("qwen3")
    before = {report.worker_id: report for report in platform.await_zero().workers}
    answer = complete(platform, tenant.key, model, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    for view in platform.views():  # each worker reports by itself, a tenth of a second after a change
        after = {report.worker_id: report for report in view.workers}
        decoded = after["decode-0"].num_positions_decoded - before["decode-0"].num_positions_decoded
        prefilled = after["prefill-0"].num_positions_prefilled - before["prefill-0"].num_positions_prefilled
        if decoded >= NUM_TOKENS - 1 and prefilled >= len(PROMPT):
            break
    assert platform.pid("prefill-0") != platform.pid("decode-0")
    assert decoded == NUM_TOKENS - 1
    assert after["decode-0"].num_positions_prefilled == before["decode-0"].num_positions_prefilled
    assert prefilled == len(PROMPT)
    assert after["prefill-0"].num_positions_decoded == before["prefill-0"].num_positions_decoded
    config = json.loads((tenant.checkpoint("qwen3") / "config.json").read_text())
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    trailer_bytes = 16
    received = after["decode-0"].kv_bytes_received - before["decode-0"].kv_bytes_received
    assert received == len(PROMPT) * per_token + trailer_bytes


def test_stream_has_an_event_per_token(platform: Platform, tenant: Tenant) -> None:
    *_, state = stream(platform, tenant.key, tenant.model("llama"), PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert state.done
    assert len(state.token_ids) == state.num_events_with_token == NUM_TOKENS
    assert state.usage is not None and state.usage["completion_tokens"] == NUM_TOKENS
    assert state.finish_reason == "length"


def test_trace_spans_all_services(platform: Platform, tenant: Tenant) -> None:
    platform.await_zero()
    answer = complete(platform, tenant.key, tenant.model("llama"), PROMPT, max_tokens=4, ignore_eos=True)

    def is_complete() -> bool:  # each service writes its finished spans in batches, the root's last
        trace = trace_of(platform, answer["id"])
        services, names = {span["service"] for span in trace}, {span["name"] for span in trace}
        return services >= {"gateway", "scheduler", "worker"} and {"prefill.run", "decode.run"} <= names

    wait_until(is_complete, "the trace of all services")
    platform.await_zero()
    assert trace_of(platform, answer["id"])  # of one root, still


def trace_of(platform: Platform, request_id: str) -> list[dict[str, Any]]:
    """The request's spans that are written by now; none before the root is."""
    spans = platform.spans()
    roots = [span for span in spans if span["attributes"].get("request_id") == request_id and not span["parent_id"]]
    assert len(roots) <= 1
    return [span for root in roots for span in spans if span["trace_id"] == root["trace_id"]]

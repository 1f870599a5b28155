"""Anthropic's API as its official client for Node.js uses it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import AFTER_CALL, TEXT, Clients

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(clients: Clients) -> dict[str, Any]:
    return clients.run_node("anthropic.mjs")


def test_models(clients: Clients, results: dict[str, Any]) -> None:
    assert results["models"] == [clients.embedding_model, clients.model] and results["retrieved"] == clients.model


def test_messages(results: dict[str, Any]) -> None:
    message, streamed = results["messages"], results["messages_stream"]
    assert message["text"] == streamed["text"] == TEXT and message["stop"] == streamed["stop"] == "end_turn"
    for usage in (message["usage"], streamed["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == results["count"]
        assert usage["output_tokens"] == 4
    assert [kind for kind in streamed["types"] if kind != "ping"] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("choice", ["auto", "any", "tool"])
def test_tool_is_called(results: dict[str, Any], choice: str) -> None:
    assert results[f"tools_{choice}"] == {"name": "weather", "input": {"city": "Zürich"}, "stop": "tool_use"}


def test_streamed_tool_and_its_result(results: dict[str, Any]) -> None:
    assert results["tool_result"] == {"input": {"city": "Zürich"}, "text": AFTER_CALL}


def test_format(results: dict[str, Any]) -> None:
    assert results["parse"]["runner"] in ("first", "last") and set(results["parse"]) == {"runner", "is_lit"}


@pytest.mark.parametrize(
    ("name", "error", "status", "type_"),
    [
        ("key", "AuthenticationError", 401, "authentication_error"),
        ("model", "NotFoundError", 404, "not_found_error"),
        ("field", "BadRequestError", 400, "invalid_request_error"),
        ("rate", "RateLimitError", 429, "rate_limit_error"),
    ],
)
def test_errors(results: dict[str, Any], name: str, error: str, status: int, type_: str) -> None:
    refusal = results[f"error_{name}"]
    assert (refusal["name"], refusal["status"], refusal["type"]) == (error, status, type_)
    assert (refusal["retryAfter"] is not None) == (status == 429)


def test_abort(results: dict[str, Any]) -> None:
    assert results["abort"]["error"] == "APIUserAbortError" and results["abort"]["received"] >= 3

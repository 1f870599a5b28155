"""OpenAI's API as its official client for Node.js uses it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import AFTER_CALL, ANSWER, TEXT, Clients

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(clients: Clients) -> dict[str, Any]:
    return clients.run_node("openai.mjs")


def test_models(clients: Clients, results: dict[str, Any]) -> None:
    assert results["models"] == [clients.embedding_model, clients.model] and results["retrieved"] == clients.model


def test_chat(results: dict[str, Any]) -> None:
    chat, streamed = results["chat"], results["chat_stream"]
    assert chat["text"] == streamed["text"] == results["completions"] == TEXT and chat["finish"] == "stop"
    assert [delta for delta in streamed["deltas"] if delta] == list(ANSWER)
    for usage in (chat["usage"], streamed["usage"]):
        assert usage["completion_tokens"] == 4 and usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert results["chat_parse"]["runner"] in ("first", "last")


@pytest.mark.parametrize("choice", ["auto", "required", "function"])
def test_tool_is_called(results: dict[str, Any], choice: str) -> None:
    call = {"name": "weather", "arguments": {"city": "Zürich"}, "finish": "tool_calls"}
    assert results[f"chat_tools_{choice}"] == call


def test_runner_of_tools(results: dict[str, Any]) -> None:
    assert results["chat_run_tools"] == {"text": AFTER_CALL, "result": "rain in Zürich"}


def test_responses(results: dict[str, Any]) -> None:
    response, streamed = results["responses"], results["responses_stream"]
    assert response["text"] == streamed["text"] == TEXT and response["status"] == "completed"
    assert response["usage"]["output_tokens"] == 4
    assert streamed["types"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert results["responses_parse"]["runner"] in ("first", "last")
    assert results["responses_tools"] == {"name": "weather", "arguments": {"city": "Zürich"}, "text": AFTER_CALL}


def test_embeddings(results: dict[str, Any]) -> None:
    embeddings = results["embeddings"]
    assert embeddings["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    for whole, decoded in zip(embeddings["floats"], embeddings["base64"], strict=True):
        assert whole == pytest.approx(decoded, rel=1e-6) and sum(value * value for value in whole) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "error", "status", "param"),
    [
        ("key", "AuthenticationError", 401, None),
        ("model", "NotFoundError", 404, "model"),
        ("field", "BadRequestError", 400, "temperature"),
        ("response_field", "BadRequestError", 400, "max_output_tokens"),
        ("rate", "RateLimitError", 429, None),
    ],
)
def test_errors(results: dict[str, Any], name: str, error: str, status: int, param: str | None) -> None:
    refusal = results[f"error_{name}"]
    assert (refusal["name"], refusal["status"], refusal["param"]) == (error, status, param)
    assert (refusal["retryAfter"] is not None) == (status == 429)


def test_abort(results: dict[str, Any]) -> None:
    assert results["abort"] == 3

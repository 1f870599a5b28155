"""OpenAI's API as the AI SDK uses it."""

from __future__ import annotations

import pytest

from tests.clients.conftest import AFTER_CALL, ANSWER, TEXT, Clients

pytestmark = pytest.mark.e2e


def test_ai_sdk(clients: Clients) -> None:
    results = clients.run_node("ai_sdk.mjs")
    assert results["generate"] == {"text": TEXT, "finish": "stop", "usage": 4}
    assert results["stream"] == {"parts": list(ANSWER), "finish": "stop", "usage": 4}
    assert results["tools"] == {"calls": [["weather", {"city": "Zürich"}]], "text": AFTER_CALL, "steps": 2}
    assert results["stream_tools"] == {"text": AFTER_CALL, "steps": 2}
    assert results["object"]["runner"] in ("first", "last")
    assert results["embeddings"] == [64, 64]
    assert results["abort"] >= 3
    assert results["error_model"] == {"status": 404, "message": "the model 'clients/none' does not exist"}

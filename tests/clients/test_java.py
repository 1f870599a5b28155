"""OpenAI's API as Java's own HTTP client uses it."""

from __future__ import annotations

import pytest

from tests.clients.conftest import ANSWER, TEXT, Clients

pytestmark = pytest.mark.e2e


def test_java(clients: Clients) -> None:
    results = clients.run_python("java_client")
    assert results["asked_for"] == "HTTP_2"
    assert results["chat"] == {"status": 200, "version": "HTTP_1_1", "text": TEXT}
    assert results["long"] == [TEXT] * 3
    assert results["stream"] == list(ANSWER) and results["last"] == "[DONE]"
    assert results["side_by_side"] == [200] * 4
    assert results["models"] == [clients.embedding_model, clients.model]
    assert results["error_key"] == {"status": 401, "code": "invalid_api_key"}

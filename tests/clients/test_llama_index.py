"""OpenAI's API as LlamaIndex's class uses it."""

from __future__ import annotations

import pytest

from tests.clients.conftest import AFTER_CALL, ANSWER, TEXT, Clients

pytestmark = pytest.mark.e2e


def test_llama_index(clients: Clients) -> None:
    results = clients.run_python("llama_index_client")
    assert results["chat"] == results["complete"] == TEXT and results["stream"] == list(ANSWER)
    assert results["tools"] == {"name": "weather", "arguments": {"city": "Zürich"}}
    assert results["tool_result"] == AFTER_CALL
    assert results["structured"]["runner"] in ("first", "last")

"""OpenAI's API as LangChain's classes use it."""

from __future__ import annotations

import pytest

from tests.clients.conftest import AFTER_CALL, ANSWER, TEXT, Clients

pytestmark = pytest.mark.e2e


def test_langchain(clients: Clients) -> None:
    results = clients.run_python("langchain_client")
    usage = results["invoke"]["usage"]
    assert results["invoke"]["text"] == TEXT and usage["output_tokens"] == 4
    assert results["batch"] == [TEXT] * 3 and results["stream"] == list(ANSWER)
    assert results["tools"] == {"name": "weather", "arguments": {"city": "Zürich"}}
    assert results["tool_result"] == AFTER_CALL and results["required_tool"] == ["weather"]
    assert results["json_schema"]["runner"] in ("first", "last")
    assert results["function_calling"]["runner"] in ("first", "last")
    assert results["responses"] == results["responses_stream"] == TEXT
    assert results["embeddings"] == [64, 64]

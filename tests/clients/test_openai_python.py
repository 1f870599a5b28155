"""OpenAI's API as its official client for Python uses it: retries and cancelled streams."""

from __future__ import annotations

import openai
import pytest

from tests.clients.conftest import TEXT, Clients
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e


def client_of(clients: Clients, key: str, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{clients.platform.http}/v1", api_key=key, max_retries=max_retries, timeout=60)


def test_refused_request_is_retried_after_the_time_that_the_reply_names(clients: Clients) -> None:
    client = client_of(clients, clients.limited_key(requests_per_minute=12), max_retries=2)
    num_retries = 0
    while not num_retries:
        reply = client.chat.completions.with_raw_response.create(
            model=clients.model, messages=[{"role": "user", "content": "Run."}]
        )
        num_retries = reply.retries_taken
        assert reply.parse().choices[0].message.content == TEXT
    assert num_retries == 1


def test_tokens_of_a_cancelled_stream_are_billed(clients: Clients) -> None:
    before = clients.completion_tokens()
    received = 0
    with client_of(clients, clients.key).chat.completions.create(
        model=clients.model, messages=[{"role": "user", "content": "Count."}], max_tokens=3500, stream=True
    ) as stream:
        for chunk in stream:
            received += bool(chunk.choices and chunk.choices[0].delta.content)
            if received == 3:
                break
    wait_until(lambda: clients.completion_tokens() > before, "the bill of the cancelled stream")
    assert received <= clients.completion_tokens() - before < 3500

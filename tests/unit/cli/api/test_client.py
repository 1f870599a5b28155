"""Calls of the gateway: errors, restarts, streams of answers and their figures."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from tests.unit.cli.fake_gateway import ADMIN_KEY, TENANT_KEY, FakeGateway, running_gateway
from torchrelay.cli.api.chat_stream import Answer, ChatEvent, parse_event, stream_chat
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import ApiError, CliError, Unreachable


def test_gateway_error_prints_its_message(gateway: FakeGateway) -> None:
    with (
        GatewayClient(gateway.url, "tr-wrong") as client,
        pytest.raises(ApiError, match="the key is not known") as caught,
    ):
        client.call("GET", "/v1/models")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "--key" in caught.value.hint


def test_refused_environment_key_is_named(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_API_KEY", "tr-stale")
    with GatewayClient(gateway.url, "tr-stale") as client:
        for ask in (lambda: client.call("GET", "/v1/models"), client.stream("GET", "/v1/models").__enter__):
            with pytest.raises(ApiError) as caught:
                ask()
            assert caught.value.message == "the key in TORCHRELAY_API_KEY is invalid or revoked"
            assert caught.value.hint.startswith("unset it to use this home's key")
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    with GatewayClient(gateway.url, "tr-other") as client, pytest.raises(ApiError, match="the key is not known"):
        client.call("GET", "/v1/models")


def test_https_to_plain_gateway_hints_at_http(gateway: FakeGateway) -> None:
    url = gateway.url.replace("http://", "https://")
    with GatewayClient(url, TENANT_KEY) as client, pytest.raises(CliError) as caught:
        client.call("GET", "/v1/models")
    assert (caught.value.message, caught.value.hint) == (f"{url} does not speak TLS", f"write {gateway.url}")


def test_white_space_around_a_key_is_nothing(gateway: FakeGateway) -> None:
    for key in (f"{TENANT_KEY}\n", f"{TENANT_KEY}\r\n", f" {TENANT_KEY}", f"\t{TENANT_KEY} \n"):
        with GatewayClient(gateway.url, key) as client:
            assert client.call("GET", "/v1/models")["data"]
    for key in (f"{TENANT_KEY}\nX-Other: 1", f"{TENANT_KEY} b", "tr-schlüssel", f"{TENANT_KEY}\x00"):
        with pytest.raises(CliError, match=r"^the key has characters that no key has$") as caught:
            GatewayClient(gateway.url, key)
        assert key[:6] not in caught.value.hint


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_loopback_asks_no_proxy(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The proxy would get the key; it cannot reach this host's loopback anyway."""
    for variable in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nothing listens there
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with GatewayClient(gateway.url.replace("127.0.0.1", name), TENANT_KEY) as client:
        assert client.call("GET", "/v1/models")["data"]
    with GatewayClient("http://192.0.2.1:8080", TENANT_KEY) as client, pytest.raises(Unreachable, match="refused"):
        client.call("GET", "/v1/models")  # of the proxy: other hosts may be behind it


def test_request_waits_for_restarting_gateway() -> None:
    with running_gateway() as before:
        port = int(before.url.rpartition(":")[2])
    with ExitStack() as gateways:

        def supervised() -> bool:
            """Asked after the first refusal; the gateway comes up then."""
            if not opened_gateways:
                opened_gateways.append(gateways.enter_context(running_gateway(port)))
            return True

        opened_gateways: list[FakeGateway] = []
        with GatewayClient(before.url, TENANT_KEY, is_supervised=supervised) as client:
            assert client.call("GET", "/v1/models")["data"]
            assert len(opened_gateways) == 1
            with client.stream("POST", "/v1/chat/completions", json={}) as lines:
                assert next(lines) == b": waiting"


def test_absent_gateway_is_given_up() -> None:
    with (
        GatewayClient("http://127.0.0.1:1", ADMIN_KEY, is_supervised=lambda: True, restart_timeout_s=0.2) as client,
        pytest.raises(Unreachable, match="is restarting"),
    ):
        client.call("GET", "/v1/models")


def test_absent_gateway_is_error() -> None:
    for url, why in (("http://127.0.0.1:1", "does not answer"), ("localhost", "not a valid address")):
        with GatewayClient(url, ADMIN_KEY) as client, pytest.raises(CliError, match=why):
            client.call("GET", "/v1/models")


def test_answer_streams_text_and_usage(gateway: FakeGateway) -> None:
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        events = list(stream_chat(client, "acme/tiny", [{"role": "user", "content": "hi"}], {"max_tokens": 9}))
    assert events[0].is_waiting
    assert [event.text for event in events if event.text] == list(gateway.pieces)  # U+2028 does not break a line
    assert events[-1].num_output_tokens == 3
    body = gateway.asked[-1][2]
    assert (body["stream"], body["max_tokens"], body["messages"][0]["content"]) == (True, 9, "hi")


def test_interrupted_answer_is_error(gateway: FakeGateway) -> None:
    gateway.hang_after_pieces = True
    gateway.released.set()
    with GatewayClient(gateway.url, TENANT_KEY) as client, pytest.raises(Unreachable, match="ended early"):
        list(stream_chat(client, "acme/tiny", [], {}))


def test_closing_events_ends_call(gateway: FakeGateway) -> None:
    gateway.hang_after_pieces = True
    with GatewayClient(gateway.url, TENANT_KEY) as client, closing(stream_chat(client, "acme/tiny", [], {})) as events:
        assert next(event.text for event in events if event.text) == "Hel"


def test_stream_error_is_raised() -> None:
    with pytest.raises(ApiError, match="worker was lost"):
        parse_event(b'data: {"error": {"message": "the worker was lost", "code": "unavailable"}}')
    assert parse_event(b"") is None
    assert parse_event(b"event: ping") is None


def test_answer_shows_rate_and_times() -> None:
    """Tokens that arrive together have no rate."""
    times = iter([10.0, 10.25, 10.75])  # asked, first piece, last piece
    answer = Answer(lambda: next(times))
    answer.add(ChatEvent(is_waiting=True))
    assert answer.summary() == ""  # nothing is known yet
    answer.add(ChatEvent("req-1", "Hel"))
    assert answer.summary() == "first token after 250 ms · req-1"
    answer.add(ChatEvent("req-1", "lo"))
    answer.add(ChatEvent("req-1", finish="length", num_output_tokens=11))
    assert (answer.ttft_s, answer.tokens_per_s, answer.text) == (0.25, 20.0, "Hello")
    assert answer.summary() == "first token after 250 ms · 11 tokens · 20 tokens/s · cut off at max_tokens · req-1"
    times = iter([10.0, 10.25, 10.2504])
    answer = Answer(lambda: next(times))
    for event in (ChatEvent("req-1", "Hel"), ChatEvent("req-1", "lo"), ChatEvent("req-1", num_output_tokens=11)):
        answer.add(event)
    assert answer.summary() == "first token after 250 ms · 11 tokens · req-1"

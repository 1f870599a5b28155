"""Errors of the gateway, and a gateway that restarts."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.unit.cli.fake_gateway import ADMIN_KEY, TENANT_KEY, FakeGateway, running_gateway
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


@pytest.mark.parametrize("key", [f"{TENANT_KEY}\n", f"{TENANT_KEY}\r\n", f" {TENANT_KEY}", f"\t{TENANT_KEY} \n"])
def test_white_space_around_a_key_is_nothing(gateway: FakeGateway, key: str) -> None:
    with GatewayClient(gateway.url, key) as client:
        assert client.call("GET", "/v1/models")["data"]


@pytest.mark.parametrize("key", [f"{TENANT_KEY}\nX-Other: 1", f"{TENANT_KEY} b", "tr-schlüssel", f"{TENANT_KEY}\x00"])
def test_malformed_key_is_refused_without_repeating_it(gateway: FakeGateway, key: str) -> None:
    with pytest.raises(CliError) as caught:
        GatewayClient(gateway.url, key)
    assert caught.value.message == "the key has characters that no key has" and key[:6] not in caught.value.hint


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
    with GatewayClient("http://127.0.0.1:1", ADMIN_KEY) as client, pytest.raises(Unreachable, match="does not answer"):
        client.call("GET", "/v1/models")
    with GatewayClient("localhost", ADMIN_KEY) as client, pytest.raises(CliError, match="not a valid address"):
        client.call("GET", "/v1/models")

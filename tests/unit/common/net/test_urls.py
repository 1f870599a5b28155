"""URLs with credentials in them: shown without, and taken apart."""

from __future__ import annotations

import pytest

from torchrelay.common.net.urls import NatsServers, nats_servers, with_credentials, without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://ann:hunter2@host:4222", "nats://ann:***@host:4222"),
        ("redis://:hunt@er2@host/0", "redis://:***@host/0"),
        ("ann:hunter2@host", "ann:***@host"),
        ("postgresql://host/name?password=hunter2&user=ann", "postgresql://host/name?password=***&user=ann"),
        ("nats://host:4222", "nats://host:4222"),
        ("nats://a:secret1@h1:4222,nats://b:secret2@h2:4222", "nats://a:***@h1:4222,nats://b:***@h2:4222"),
        ("nats://a:secret1@h1, nats://h2", "nats://a:***@h1, nats://h2"),
        ("nats://a:secret1@h1,h2", "nats://a:***@h1,h2"),
        ("a:secret1@h1,b:secret2@h2", "a:***@h2"),
        ("nats://secret@h1,tls://h2", "nats://***@h1,tls://h2"),
        ("secret@h1", "***@h1"),
        ("postgresql://ann@host/name", "postgresql://ann@host/name"),
        ("postgresql://ann:hunt,er2@host/name", "postgresql://ann:***@host/name"),
        ("redis://:hunt://er2@host/0", "redis://:***@host/0"),
        ("", ""),
    ],
)
def test_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("nats://host:4222", NatsServers(["nats://host:4222"], None, None)),
        ("host:4222", NatsServers(["nats://host:4222"], None, None)),
        ("nats://ann:pw@one:1, nats://two:2", NatsServers(["nats://one:1", "nats://two:2"], "ann", "pw")),
        ("tls://a%40b:p%3Aw@one", NatsServers(["tls://one"], "a@b", "p:w")),
        ("nats://secret@one", NatsServers(["nats://one"], "secret", None)),
    ],
)
def test_nats_url_splits_into_servers_and_credentials(url: str, servers: NatsServers) -> None:
    assert nats_servers(url) == servers


def test_credentials_round_trip_through_url() -> None:
    url = with_credentials("nats://host:4222", "prefill-0", "p:@/w")
    assert nats_servers(url) == NatsServers(["nats://host:4222"], "prefill-0", "p:@/w")

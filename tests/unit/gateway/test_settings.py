from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.process.settings import setting_errors
from torchrelay.gateway.resource_names import check_name
from torchrelay.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"database_url": "foo"}, "database_url (TORCHRELAY_DATABASE_URL): must be sqlite:///path or postgresql"),
        ({"database_url": "mysql://host/name"}, "not 'mysql://host/name'"),
        ({"database_url": "mysql://ann:hunter2@host/name"}, "not 'mysql://ann:***@host/name'"),
        ({"database_url": "postgresql://ann:hunter/2@host/name"}, "has no valid port: in the password, write / as %2F"),
        ({"admin_key": "tra-0123456789"}, "admin_key (TORCHRELAY_ADMIN_KEY): must be tra- and at least 32 random"),
        ({"admin_key": "0" * 64}, "admin_key (TORCHRELAY_ADMIN_KEY): must be tra- and"),
        ({"http_port": 99999}, "http_port (TORCHRELAY_HTTP_PORT): Input should be less than or equal to 65535"),
        (
            {"cors_origins": "app.example"},
            "cors_origins (TORCHRELAY_CORS_ORIGINS): must be * or origins such as https:/",
        ),
        ({"cors_origins": "https://app.example, https://b.example/"}, "not 'https://b.example/'"),
        ({"cors_origins": "https://App.example"}, "not 'https://App.example'"),
    ],
)
def test_invalid_setting_is_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GatewaySettings(**wrong)  # type: ignore[arg-type]
    shown = setting_errors(caught.value)[0]
    assert said in shown and "hunter" not in shown


def test_valid_admin_keys_are_accepted() -> None:
    assert GatewaySettings(admin_key=f"tra-{'0' * 32}").admin_key
    assert GatewaySettings(admin_key="").admin_key == ""


def test_origins_are_listed_with_commas() -> None:
    for setting, origins in (
        ("", set()),
        (" , ", set()),
        ("*", {"*"}),
        (
            "https://a.example,http://localhost:3000 , http://[::1]:8080",
            {"https://a.example", "http://localhost:3000", "http://[::1]:8080"},
        ),
    ):
        assert GatewaySettings(cors_origins=setting).allowed_origins == origins


def test_default_addresses_match_the_other_services() -> None:
    settings = GatewaySettings()
    assert (settings.store_address, settings.scheduler_address) == ("127.0.0.1:7103", "127.0.0.1:7101")
    for url in ("sqlite:///ledger.db", "postgresql://a:b@host/name", "postgresql+asyncpg://host/name"):
        assert GatewaySettings(database_url=url).database_url == url


@given(st.text(max_size=70))
def test_resource_names_are_checked(name: str) -> None:
    try:
        check_name(name, "model")
    except InvalidRequest as error:
        assert error.field == "model"
    else:
        assert 1 <= len(name) <= 64
        assert name.isascii() and name == name.lower()
        assert not set(name) & set("/ \t\n\\") and name not in (".", "..")

from __future__ import annotations

import pytest
from pydantic import ValidationError

from torchrelay.common.process.settings import setting_errors
from torchrelay.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"database_url": "foo"}, "database_url (TORCHRELAY_DATABASE_URL): must be sqlite:///path or postgresql"),
        ({"database_url": "mysql://host/name"}, "not 'mysql://host/name'"),
        ({"http_port": 99999}, "http_port (TORCHRELAY_HTTP_PORT): Input should be less than or equal to 65535"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GatewaySettings(**wrong)  # type: ignore[arg-type]
    assert said in setting_errors(caught.value)[0]


def test_the_ports_of_a_hand_started_platform_fit() -> None:
    settings = GatewaySettings()
    assert (settings.store_address, settings.scheduler_address) == ("127.0.0.1:7103", "127.0.0.1:7101")
    for url in ("sqlite:///ledger.db", "postgresql://a:b@host/name", "postgresql+asyncpg://host/name"):
        assert GatewaySettings(database_url=url).database_url == url

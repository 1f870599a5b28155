from __future__ import annotations

import pytest

from torchrelay.gateway.limits.connection_shares import messages_at_once
from torchrelay.gateway.settings import GatewaySettings


@pytest.mark.parametrize(("max_bytes", "expected"), [(64 << 20, 8), (16 << 20, 2), (100, 1)])
def test_messages_that_arrive_fit_in_the_bytes_of_bodies(max_bytes: int, expected: int) -> None:
    assert messages_at_once(max_bytes, GatewaySettings().max_body_bytes) == expected

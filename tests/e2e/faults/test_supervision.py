"""A hung process is as dead as one that ended: `up` replaces it, and the platform serves again."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete
from tests.support.wait import HANG_S, wait_until

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 60))
CHILDREN = ["redis", "nats", "gateway", "scheduler", "param-store", "prefill-0", "decode-0"]


def served_again(tenant: Tenant, model: str) -> list[int]:
    """The tokens of the first request that succeeds; the platform may refuse some before it has noticed everything."""
    tokens: list[int] = []

    def is_answered() -> bool:
        with suppress(AssertionError, httpx.TransportError):
            answer = complete(tenant.platform, tenant.key, model, PROMPT, max_tokens=8, ignore_eos=True)
            tokens.extend(answer["choices"][0]["token_ids"])
        return bool(tokens)

    wait_until(is_answered, "an answer", 2 * HANG_S)
    return tokens


@pytest.mark.parametrize("child", CHILDREN)
def test_hung_child_is_replaced_alone(shaken: Tenant, child: str) -> None:
    platform, model = shaken.platform, shaken.model()
    expected = served_again(shaken, model)
    others = {name: platform.pid(name) for name in CHILDREN if name != child}
    stopped = platform.pid(child)
    os.kill(stopped, signal.SIGSTOP)
    platform.await_restart(child, stopped)
    assert not Path(f"/proc/{stopped}").exists()
    assert served_again(shaken, model) == expected
    assert {name: platform.pid(name) for name in others} == others, "more was replaced than what hung"
    said = (platform.home.path / "up.log").read_text()
    assert f"  {child:<12}  did not answer for 5 s; killed; restarting in" in said

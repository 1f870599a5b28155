"""A hung process is as dead as one that ended: `up` replaces it, and the platform serves again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import SMALL, Tenant
from tests.support.completions import complete
from tests.support.platform import running_platform
from tests.support.wait import HANG_S, wait_until

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 60))
CHILDREN = ["redis", "nats", "gateway", "scheduler", "param-store", "prefill-0", "decode-0"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    """A tenant of a platform whose processes these tests stop."""
    options = (*SMALL, "--idle-timeout-s", "120")
    with running_platform(tmp_path_factory.mktemp("watched"), options) as platform:
        yield Tenant(platform, "acme", platform.tenant("acme"), tmp_path_factory.mktemp("checkpoints"))


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
def test_hung_child_is_replaced_alone(watched: Tenant, child: str) -> None:
    platform, model = watched.platform, watched.model()
    expected = served_again(watched, model)
    others = {name: platform.pid(name) for name in CHILDREN if name != child}
    stopped = platform.pid(child)
    os.kill(stopped, signal.SIGSTOP)
    platform.await_restart(child, stopped)
    assert not Path(f"/proc/{stopped}").exists()
    assert served_again(watched, model) == expected
    assert {name: platform.pid(name) for name in others} == others, "more was replaced than what hung"
    said = (platform.home.path / "up.log").read_text()
    assert f"  {child:<12}  did not answer for 5 s; killed; restarting in" in said

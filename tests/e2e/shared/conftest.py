"""A platform for tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.tenants import SMALL, Tenant
from tests.support.platform import Platform, running_platform


@pytest.fixture(scope="package")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A prefill and a decode worker; models go to zero after 3 idle seconds.

    Its home has characters that URLs, configuration files and shells give a meaning, and a proxy of the environment
    would answer nothing.
    """
    home = tmp_path_factory.mktemp("platform") / "plätform 数 #1 50%? \"q' \\z"
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"), "http://127.0.0.1:9")
    with running_platform(home, (*SMALL, "--idle-timeout-s", "3"), proxy) as running:
        yield running
        assert [path.name for path in home.parent.iterdir()] == [home.name]


@pytest.fixture(scope="package")
def tenant(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Tenant:
    return Tenant(platform, "acme", platform.tenant("acme"), tmp_path_factory.mktemp("checkpoints"))

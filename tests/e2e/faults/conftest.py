"""A platform whose processes are killed and stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.e2e.tenants import SMALL, Tenant
from tests.support.platform import running_platform

ENVIRONMENT = {"TORCHRELAY_SWEEP_AFTER_S": "2", "TORCHRELAY_GRACE_S": "40"}


@pytest.fixture(scope="package")
def shaken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    """A tenant of a platform that these tests may break."""
    options = (*SMALL, "--idle-timeout-s", "120")
    with running_platform(tmp_path_factory.mktemp("shaken"), options, ENVIRONMENT) as platform:
        yield Tenant(platform, "acme", platform.tenant("acme"), tmp_path_factory.mktemp("checkpoints"))


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """The processes hang within the block."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it was replaced
                os.kill(pid, signal.SIGCONT)

"""Little shared memory, as in a container: the platform takes less of it, and serves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.lab]


def test_platform_recovers_with_24_mib_of_shared_memory(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare is not installed: apt-get install util-linux"
    module = (sys.executable, "-m", "tests.hostile.platforms.small_shared_memory", str(tmp_path), "24")
    ran = subprocess.run((unshare, "--mount", *module), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "served\n"

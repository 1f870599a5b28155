"""Every start comes up, whatever ports other programs open and close meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.lab]
NUM_STARTS = int(os.environ.get("TORCHRELAY_TEST_STARTS", "3"))


@pytest.mark.timeout(120 * (NUM_STARTS + 1))
def test_starts_survive_three_hundred_port_changes_a_second(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare is not installed: apt-get install util-linux"
    module = (sys.executable, "-m", "tests.hostile.platforms.port_changes", str(tmp_path), str(NUM_STARTS))
    ran = subprocess.run((unshare, "--net", *module), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["up"] == result["starts"] == NUM_STARTS, ran.stderr
    assert result["port_changes"] > 100 * NUM_STARTS

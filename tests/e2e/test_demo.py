"""`make demo` interrupted by Ctrl-C: one word, status 130, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.parametrize("step", ["1. Start the platform", "3. Upload"])
def test_ctrl_c_stops_the_demo(tmp_path: Path, step: str) -> None:
    process = subprocess.Popen(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    with process.stdout as output:
        said = ""
        for line in output:
            said += line
            if step in line:
                process.send_signal(signal.SIGINT)
                break
        said += output.read()
    assert process.wait(60) == 130, said
    assert said.endswith("stopped\n")
    assert "Traceback" not in said
    assert list(tmp_path.glob("torchrelay-demo-*")) == []

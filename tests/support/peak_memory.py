"""How much memory loading a tokenizer takes at its peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# NOTE: not getrusage, whose peak a process inherits from the one that started it.
_SCRIPT = """
import re, sys
from pathlib import Path
from torchrelay.common.tokens import tokenizer

def peak_kb():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak_kb()
loaded = getattr(tokenizer, sys.argv[1])(Path(sys.argv[2]))
print(peak_kb() - before)
"""


def peak_kb(load: str, path: Path) -> int:
    """KiB that ``load`` (a function of ``common.tokens.tokenizer``) adds to a fresh process's peak."""
    command = [sys.executable, "-c", _SCRIPT, load, str(path)]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)

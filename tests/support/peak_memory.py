"""How much memory loading a tokenizer takes, at its peak and afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# NOTE: not getrusage, whose peak a process inherits from the one that started it.
_SCRIPT = """
import re, sys
from pathlib import Path
from torchrelay.common.tokens import tokenizer

load, path, num_before, num_measured, measure = sys.argv[1:]

def memory_kb():
    return int(re.search(measure + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def loaded(num):
    return [getattr(tokenizer, load)(Path(path)) for _ in range(int(num))]

first = loaded(num_before)
before = memory_kb()
others = loaded(num_measured)
print(memory_kb() - before)
"""


def peak_kb(load: str, path: Path) -> int:
    """KiB that ``load`` (a function of ``common.tokens.tokenizer``) adds to a fresh process's peak."""
    return _added_kb(load, path, 0, 1, "VmHWM")


def held_kb(load: str, path: Path) -> float:
    """KiB that a process keeps per call of ``load``, beyond what the first calls leave free for later ones."""
    return _added_kb(load, path, 4, 4, "VmRSS") / 4


def _added_kb(load: str, path: Path, num_before: int, num_measured: int, measure: str) -> int:
    command = [sys.executable, "-c", _SCRIPT, load, str(path), str(num_before), str(num_measured), measure]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)

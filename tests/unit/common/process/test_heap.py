"""The heap gives large blocks back."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from pathlib import Path
from torchrelay.common.process.heap import keep_heap_small

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

keep_heap_small()
before = resident_bytes()
for size in (20 << 20, 10 << 20):  # glibc would take the second, after the first was freed, from a heap that it keeps
    kept = [bytearray(size), bytearray(1 << 10)]
    del kept[0]
print(resident_bytes() - before)
"""


def test_large_blocks_return_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert int(said) < 1 << 20

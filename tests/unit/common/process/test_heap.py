"""The heap gives blocks back, and the limit of descriptors is raised."""

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


def test_large_blocks_return_to_system() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert int(said) < 1 << 20


FRAGMENTS = """
import asyncio, ctypes
from pathlib import Path
from torchrelay.common.process.heap import keep_heap_small, return_free_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

async def main():
    keep_heap_small()
    before = resident_bytes()
    blocks = [libc.malloc(16 << 10) for _ in range(4096)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 10)
    for block in blocks[:-1]:  # the last one stays, and keeps the others from the end of the heap
        libc.free(block)
    assert resident_bytes() - before > 60 << 20
    async with asyncio.timeout(20):
        returning = asyncio.ensure_future(return_free_memory(0.01))
        while resident_bytes() - before > 8 << 20:
            await asyncio.sleep(0.01)
        returning.cancel()

asyncio.run(main())
"""


def test_memory_between_used_blocks_returns_to_system() -> None:
    subprocess.run([sys.executable, "-c", FRAGMENTS], check=True)


DESCRIPTORS = """
import resource
from torchrelay.common.process.descriptors import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000))
for _ in range(2):
    print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_soft_descriptor_limit_is_raised() -> None:
    told = subprocess.run([sys.executable, "-c", DESCRIPTORS], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1000"] * 6

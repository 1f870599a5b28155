"""Memory that is shared through a file: where it lies, when it is given back, and of what pages it is."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from torchrelay.common.ids import new_id
from torchrelay.transfer.pages import HUGE_BYTES, fault_in, map_shared

PAGE = 4096
SIZE = 3 * HUGE_BYTES + 5 * PAGE


@pytest.fixture
def file() -> Iterator[int]:
    path = Path("/dev/shm") / new_id("torchrelay-test")
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    os.ftruncate(opened, SIZE)
    yield opened
    os.close(opened)


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def mapped_bytes(address: int, kind: str) -> int:
    """Of the mapping that begins at ``address``, as Linux counts it; 0: nothing is mapped there."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if int(mapping.partition("-")[0], 16) == address:
            found = re.search(rf"^{kind}: +(\d+) kB", mapping, re.MULTILINE)
            return int(found.group(1)) << 10 if found else 0
    return 0


@pytest.mark.parametrize("offset", [0, PAGE, HUGE_BYTES - PAGE, HUGE_BYTES + 3 * PAGE])
def test_a_range_is_the_files_and_lies_as_it_lies_in_the_file(file: int, offset: int) -> None:
    fault_in(file, map_shared(file, SIZE, writable=True), 0, SIZE)
    os.pwrite(file, b"first", offset)
    memory = map_shared(file, SIZE - offset, offset)
    assert bytes(memory[:5]) == b"first"
    assert len(memory) == SIZE - offset
    assert (address_of(memory) - offset) % HUGE_BYTES == 0
    with pytest.raises(TypeError):
        memory[0] = 1


def test_what_one_writes_the_other_reads(file: int) -> None:
    writer, reader = map_shared(file, SIZE, writable=True), map_shared(file, SIZE - PAGE, PAGE)
    fault_in(file, writer, 0, SIZE)
    writer[PAGE : PAGE + 4] = b"here"
    assert bytes(reader[:4]) == b"here"


def test_memory_is_given_back_with_its_last_view(file: int) -> None:
    memory = map_shared(file, SIZE)
    address, view = address_of(memory), memory[10:20]
    assert mapped_bytes(address, "Size") == SIZE
    del memory
    gc.collect()
    assert mapped_bytes(address, "Size") == SIZE
    del view
    gc.collect()
    assert mapped_bytes(address, "Size") == 0


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def test_what_cannot_be_mapped_says_so_and_leaves_nothing(file: int) -> None:
    before = address_space_bytes()
    for _ in range(100):
        with pytest.raises(OSError, match="Invalid"):
            map_shared(file, SIZE, offset=1)
    assert address_space_bytes() < before + 50 * SIZE


@pytest.mark.parametrize(("begin", "end"), [(0, SIZE), (PAGE, SIZE), (HUGE_BYTES, 2 * HUGE_BYTES), (PAGE, 7 * PAGE)])
def test_pages_are_given_zeroed(file: int, begin: int, end: int) -> None:
    memory = map_shared(file, SIZE, writable=True)
    fault_in(file, memory, begin, end - begin)
    assert os.fstat(file).st_blocks * 512 == end - begin
    assert mapped_bytes(address_of(memory), "Rss") == end - begin
    assert not any(memory[begin:end])

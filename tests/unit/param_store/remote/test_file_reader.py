"""Reads past the page cache, and through it where a file system takes the flag and refuses the read."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchrelay.common.errors import DataCorrupted
from torchrelay.param_store.remote.file_reader import FileReader, ReadBuffers
from torchrelay.transfer.manifest import PAGE_BYTES

DATA = os.urandom(3 * PAGE_BYTES + 100)


class Refusing:
    """``os.preadv`` of a system that refuses direct reads for this reason."""

    def __init__(self, reason: int) -> None:
        self.reason, self.num_refused = reason, 0
        self._preadv = os.preadv

    def __call__(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views[0]) % PAGE_BYTES == 0 and self.is_direct(file):
            self.num_refused += 1
            raise OSError(self.reason, os.strerror(self.reason))
        return self._preadv(file, views, offset)

    def is_direct(self, file: int) -> bool:
        return file == self.direct

    direct = -1


@pytest.fixture
def reader(tmp_path: Path) -> FileReader:
    path = tmp_path / "pack"
    path.write_bytes(DATA)
    reader = FileReader(path, "packs/a", ReadBuffers())
    if reader.direct < 0:  # this file system refuses the flag already: any descriptor stands for it
        reader.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return reader


def read(reader: FileReader, offset: int, num_bytes: int) -> bytes:
    view = memoryview(bytearray(num_bytes))
    reader.read_into(offset, view, threading.Event())
    return bytes(view)


def test_refused_direct_read_falls_back_to_page_cache(reader: FileReader, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(errno.EINVAL)
    refusing.direct = reader.direct
    monkeypatch.setattr(os, "preadv", refusing)
    for offset in (0, PAGE_BYTES, 7):
        assert read(reader, offset, len(DATA) - offset) == DATA[offset:]
    assert refusing.num_refused == 1
    with pytest.raises(DataCorrupted, match=f"ends at byte {len(DATA)}"):
        read(reader, PAGE_BYTES, len(DATA))
    reader.close()


def test_other_read_errors_raised(reader: FileReader, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(errno.EIO)
    refusing.direct = reader.direct
    monkeypatch.setattr(os, "preadv", refusing)
    with pytest.raises(OSError, match="Input/output error"):
        read(reader, 0, PAGE_BYTES)
    reader.close()

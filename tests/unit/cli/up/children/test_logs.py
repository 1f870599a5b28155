"""Logs are bounded, also under a child that goes on writing."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.cli.up.children.logs import rotate, rotated_path, truncate_if_long

TALKER = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def test_run_starts_new_log_and_keeps_previous(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    rotate(log)  # there is none yet
    for run in ("first", "second", "third"):
        rotate(log)
        log.write_text(run)
    assert (log.read_text(), rotated_path(log).read_text()) == ("third", "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gateway.log", "gateway.log.1"]


def test_long_log_is_truncated_under_writer(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    with log.open("ab") as file:
        child = subprocess.Popen([sys.executable, "-c", TALKER], stdin=subprocess.PIPE, stdout=file, text=True)
    assert child.stdin is not None
    child.stdin.write("x" * 2000 + "\n")
    child.stdin.flush()
    while log.stat().st_size < 2001:
        assert child.poll() is None
    truncate_if_long(log, max_bytes=2001)
    assert log.stat().st_size == 2001  # not too long yet
    truncate_if_long(log, max_bytes=2000)
    assert log.stat().st_size == 0
    child.stdin.write("goes on\n")
    child.stdin.close()
    assert child.wait(10) == 0
    assert log.read_text() == "goes on\n"  # from the beginning of the file, without a hole
    assert rotated_path(log).read_text() == "x" * 2000 + "\n"


def test_full_disk_truncates_log_without_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(log: Path, copy: Path) -> None:
        copy.write_text("a part of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    log = tmp_path / "gateway.log"
    log.write_text("x" * 100)
    monkeypatch.setattr(shutil, "copyfile", full)
    truncate_if_long(log, max_bytes=99)
    assert log.read_text() == ""
    assert not rotated_path(log).exists()

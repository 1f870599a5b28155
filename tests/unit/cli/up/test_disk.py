"""Checks of the home's disk, and their messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_disk import small_disk
from torchrelay.cli.errors import CliError
from torchrelay.cli.up.disk import (
    FULL_BYTES,
    LOW_BYTES,
    DiskState,
    check_disk,
    disk_message,
    disk_state,
    folder_bytes,
    log_limit_bytes,
)

MIB = 1 << 20


def test_disk_state_has_hysteresis() -> None:
    assert disk_state(FULL_BYTES - 1) is DiskState.FULL
    assert disk_state(FULL_BYTES, DiskState.FULL) is DiskState.FULL
    assert disk_state(2 * FULL_BYTES, DiskState.FULL) is DiskState.LOW
    assert disk_state(LOW_BYTES, DiskState.LOW) is DiskState.LOW
    assert disk_state(2 * LOW_BYTES, DiskState.LOW) is DiskState.ROOMY
    assert disk_state(LOW_BYTES) is DiskState.ROOMY


def test_logs_fit_on_small_disk() -> None:
    num_files = 7 * 2 + 2  # seven children's logs, their copies, and traces of twice the length
    assert num_files * log_limit_bytes(100 * MIB) <= 50 * MIB
    assert log_limit_bytes(1 << 40) == 32 * MIB


def test_messages_name_folder() -> None:
    for state in DiskState:
        assert "/srv/home has 1.05 MB free" in disk_message(state, Path("/srv/home"), MIB)


def test_folder_bytes_counts_all_files(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(10))
    (tmp_path / "file").write_bytes(bytes(5))
    assert folder_bytes(tmp_path) == 15
    assert folder_bytes(tmp_path / "absent") == 0


@pytest.mark.lab
def test_start_on_full_disk_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", 64 * MIB) as disk:
        check_disk(disk.folder)
        disk.fill(num_free=16 * MIB)
        with pytest.raises(CliError, match=f"the disk of {disk.folder} has 16.8 MB free; a start takes 33.6 MB"):
            check_disk(disk.folder)

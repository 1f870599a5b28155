"""Progress of `torchrelay up` when it cannot print."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from rich.console import Console

from torchrelay.cli.home import Home
from torchrelay.cli.up.progress import StartupProgress
from torchrelay.cli.up.shared_memory import LeftArena


class LostTerminal(io.StringIO):
    """Takes nothing, for one cause."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, "lost")

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_stop_survives_full_disk_and_closed_terminal(tmp_path: Path, number: int) -> None:
    progress = StartupProgress(Home(tmp_path), Console(file=LostTerminal(number), width=200))
    progress.starting(["gateway"])
    progress.ready("gateway", 1.0, "127.0.0.1:8080")
    progress.stopping()
    progress.stopped()


def test_shared_memory_that_is_left_has_its_cure(tmp_path: Path) -> None:
    output = io.StringIO()
    progress = StartupProgress(Home(tmp_path), Console(file=output, width=60), is_quiet=True)
    progress.memory_left(LeftArena(Path("/dev/shm/torchrelay-0123456789ab"), 512 << 20, "/srv/[other]"))
    assert output.getvalue().splitlines()[-1] == (
        "537 MB of shared memory are left of the platform at /srv/[other], which was killed: a start there uses them"
        " again; to free them: rm /dev/shm/torchrelay-0123456789ab"
    )


def test_other_write_error_exits(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="lost"):
        StartupProgress(Home(tmp_path), Console(file=LostTerminal(errno.EBADF), width=200))

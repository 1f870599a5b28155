"""How `torchrelay up` ends: signals, progress that cannot be printed, and the shared memory of killed platforms."""

from __future__ import annotations

import asyncio
import errno
import io
import mmap
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from torchrelay.cli.home import Home
from torchrelay.cli.up.progress import StartupProgress
from torchrelay.cli.up.shared_memory import LeftArena, arena_owned, left_arenas
from torchrelay.cli.up.stop_signals import stop_on_signals
from torchrelay.common.host.machine import SHARED_MEMORY


async def outcome(*sent: signal.Signals) -> tuple[bool, int]:
    """Whether the signals stop the platform, and how often they kill it."""
    stop, kills = asyncio.Event(), 0

    def kill() -> None:
        nonlocal kills
        kills += 1

    loop, handled = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, handled.set)
    stop_on_signals(stop, kill)
    for number in (*sent, signal.SIGUSR1):  # the loop handles them in this order
        os.kill(os.getpid(), number)
    await handled.wait()
    loop.remove_signal_handler(signal.SIGUSR1)
    return stop.is_set(), kills


@pytest.fixture
def hang_up() -> Iterator[None]:
    """Does what it does by default, even if `nohup` started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def ignored_hang_up(hang_up: None) -> None:
    """As `nohup` starts a program."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_second_signal_kills(number: signal.Signals) -> None:
    assert await outcome(number) == (True, 0)
    assert await outcome(number, number) == (True, 1)


async def test_repeated_hangup_stops_in_order(hang_up: None) -> None:
    assert await outcome(signal.SIGHUP, signal.SIGHUP) == (True, 0)


async def test_nohup_keeps_it_running(ignored_hang_up: None) -> None:
    assert await outcome(signal.SIGHUP) == (False, 0)


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


NUM_BYTES = 1 << 20
# An `up` at the home argv[2], whose param-store has locked the arena argv[1].
OWNER = f"""
import fcntl, sys
from pathlib import Path
from torchrelay.cli.up.shared_memory import arena_owned
arena = Path(sys.argv[1])
with arena_owned(arena, Path(sys.argv[2])), arena.open("wb") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(bytes({NUM_BYTES}))
    file.flush()
    print("owned", flush=True)
    sys.stdin.read()
    arena.unlink()
"""


@pytest.fixture
def arena() -> Iterator[Path]:
    arena = SHARED_MEMORY / f"torchrelay-{secrets.token_hex(6)}"
    yield arena
    for path in (arena, arena.with_name(f"{arena.name}.up")):
        path.unlink(missing_ok=True)


@contextmanager
def owner(arena: Path, home: str = "/srv/a home") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, str(arena), home]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def left_at(arena: Path, own: Path = Path("/")) -> list[LeftArena]:
    return [left for left in left_arenas(own) if left.path == arena]


def test_arena_is_named_once_its_owner_was_killed(arena: Path) -> None:
    with owner(arena):
        assert left_at(arena) == []
    assert left_at(arena) == [LeftArena(arena, NUM_BYTES, "/srv/a home")]
    assert left_at(arena, own=arena) == [], "a start in its own home uses it again"
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), NUM_BYTES):
        assert left_at(arena) == [], "a worker may still compute"
    with arena_owned(arena, Path("/srv/a home")):
        assert left_at(arena) == [], "its platform runs again, and may start its param-store at any time"
    assert left_at(arena) == [LeftArena(arena, NUM_BYTES, "/srv/a home")]
    assert arena.exists()


def test_arena_is_not_named_while_its_owner_is_unknown(arena: Path) -> None:
    with owner(arena):
        pass
    arena.with_name(f"{arena.name}.up").unlink()
    assert left_at(arena) == []


def test_orderly_end_leaves_nothing(arena: Path) -> None:
    with owner(arena) as process:
        process.communicate("")
    assert list(SHARED_MEMORY.glob(f"{arena.name}*")) == []
    assert left_at(arena) == []


def test_files_of_others_are_never_named(tmp_path: Path) -> None:
    for name in ("torchrelay-sto-1", "torchrelay-0123456789ab.up", "torchrelay-run-abcd", "other"):
        (tmp_path / name).touch()
    assert left_arenas(tmp_path / "own", tmp_path) == []

"""Shared memory of killed platforms is named, that of others never."""

from __future__ import annotations

import mmap
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchrelay.cli.up.shared_memory import LeftArena, arena_owned, left_arenas
from torchrelay.common.host.machine import SHARED_MEMORY

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

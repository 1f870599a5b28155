"""Whether the store's disk and arena answer, each asked on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torchrelay.common.health import Ask
from torchrelay.param_store.store import Store

ASK_EVERY_S = 5.0
SILENT_S = 30.0  # a disk that is written to with all its might may take seconds for a file
_FILE = ".alive"


def storage_checks(store: Store) -> dict[str, Ask]:
    """By the name of the part."""
    folder = store.settings.data_dir
    return {
        f"disk of {folder}": on_own_thread("disk-check", lambda: touch(folder)),
        "arena": on_own_thread("arena-check", lambda: store.arena.free_bytes),
    }


def on_own_thread(name: str, call: Callable[[], object]) -> Ask:
    """Asks by a call that may never return."""
    thread = ThreadPoolExecutor(1, name)

    async def ask() -> str:
        await asyncio.get_running_loop().run_in_executor(thread, call)
        return ""

    return ask


def touch(folder: Path) -> None:
    """Makes and removes a file. A full disk answers, too."""
    with suppress(OSError):
        (folder / _FILE).touch()
        (folder / _FILE).unlink()

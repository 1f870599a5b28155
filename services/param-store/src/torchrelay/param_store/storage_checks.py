"""Checks whether the store's disk and arena respond, each on its own thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from torchrelay.common.health import Ask
from torchrelay.common.host.disk import is_no_space
from torchrelay.param_store.store import Store

ASK_EVERY_S = 5.0
SILENT_S = 30.0  # a disk under full write load may take seconds for a file
_FILE = ".alive"


def storage_checks(store: Store) -> dict[str, Ask]:
    """The checks, by the name of the checked part."""
    folder = store.settings.data_dir
    return {
        f"disk of {folder}": OwnThread("disk-check", lambda: touch(folder)),
        "arena": OwnThread("arena-check", lambda: store.arena.free_bytes),
    }


class OwnThread:
    """A check by a call that may never return. Then no second call begins, and the process can still exit."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self._call = call
        self._answer: Future[str] | None = None

    async def __call__(self) -> str:
        if self._answer is None or self._answer.done():
            self._answer = Future()
            self._answer.set_running_or_notify_cancel()  # from now on, callers that stop waiting do not cancel it
            # NOTE: not an executor: the interpreter waits for an executor's threads when it exits.
            threading.Thread(target=self._run, args=(self._answer,), name=self._name, daemon=True).start()
        return await asyncio.wrap_future(self._answer)

    def _run(self, answer: Future[str]) -> None:
        try:
            self._call()
        except OSError as error:
            answer.set_result(f"fails: {os.strerror(error.errno) if error.errno else error}")
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result("")


def touch(folder: Path) -> None:
    """Creates and removes a file. A full disk passes. Raises ``OSError`` if the disk fails or is read-only."""
    try:
        (folder / _FILE).touch()
        (folder / _FILE).unlink(missing_ok=True)
    except OSError as error:
        if not is_no_space(error):
            raise

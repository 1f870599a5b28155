"""Small files of versions on local disk, so that a new text process need not ask the param-store."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Self
from weakref import WeakValueDictionary

from torchrelay.common.errors import Overloaded, Unavailable
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.inference.text.processes.frames import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
    FileId,
)
from torchrelay.gateway.inference.text.processes.process_connection import LocalFile
from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru
from torchrelay.gateway.limits.tenant_turns import TenantTurns

MAX_FILE_BYTES: Final = {
    TOKENIZER: 64 << 20,
    **dict.fromkeys((TOKENIZER_CONFIG, CHAT_TEMPLATE, TOOL_TEMPLATE), 4 << 20),
}
MAX_BYTES: Final = 256 << 20
MAX_DOWNLOADS: Final = 4  # of one tenant at once
DOWNLOAD_TIMEOUT_S: Final = 60.0
FOLDER_SUFFIX: Final = "-models"


class ModelFiles:
    """An LRU cache in a temporary folder; held files stay.

    The folder is locked. A folder without a lock was left by a killed gateway, and the next gateway removes it.
    """

    def __init__(self, reader: StoreFileReader, max_bytes: int = MAX_BYTES) -> None:
        self._reader = reader
        self._folder = Path()
        self._lock = -1  # the folder's descriptor
        self._files: dict[FileId, LocalFile] = {}
        self._max_bytes = max_bytes
        self._lru: TenantLru[FileId] = TenantLru(max_bytes)
        self._num_holders: Counter[FileId] = Counter()
        # No tenant waits for a download that another tenant has queued behind its others.
        self._turns = TenantTurns(at_once=MAX_DOWNLOADS, total_at_once=sys.maxsize)
        self._downloads: WeakValueDictionary[tuple[str, FileId], asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(_remove_leftovers)
        self._folder, self._lock = _locked_folder()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    @asynccontextmanager
    async def held(self, tenant: str, wanted: Iterable[FileId]) -> AsyncIterator[list[LocalFile]]:
        """The files, which stay on disk inside the block.

        Raises ``DataCorrupted``, ``NotFound``, ``Overloaded`` (others hold too many) or ``Unavailable``.
        """
        holding: list[FileId] = []
        try:
            files: list[LocalFile] = []
            for file_id in wanted:
                self._num_holders[file_id] += 1
                holding.append(file_id)
                files.append(self._files.get(file_id) or await self._download(tenant, file_id))
                self._lru.use(file_id, tenant)
            yield files
        finally:
            for file_id in holding:
                self._num_holders[file_id] -= 1
                if not self._num_holders[file_id]:
                    del self._num_holders[file_id]

    async def _download(self, tenant: str, file_id: FileId) -> LocalFile:
        lock = self._downloads.setdefault((tenant, file_id), asyncio.Lock())
        try:
            async with asyncio.timeout(DOWNLOAD_TIMEOUT_S), lock, self._turns.turn(tenant):
                return self._files.get(file_id) or await self._save(tenant, file_id)
        except TimeoutError:
            message = f"the model's {file_id[0]} could not be read within {DOWNLOAD_TIMEOUT_S:g} s"
            raise Unavailable(message) from None
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise Unavailable(f"the gateway's disk is full ({self._folder.parent})") from error
            raise Unavailable(f"the gateway cannot keep the model's {file_id[0]}: {error.strerror}") from error

    async def _save(self, tenant: str, file_id: FileId) -> LocalFile:
        name, digest = file_id
        descriptor, path = tempfile.mkstemp(dir=self._folder)
        os.close(descriptor)
        try:
            num_bytes = await self._reader.save(digest, name, MAX_FILE_BYTES[name], Path(path))
        except BaseException:
            os.unlink(path)
            raise
        if (other := self._files.get(file_id)) is not None:  # another tenant was faster
            os.unlink(path)
            return other
        if not self._lru.can_fit(num_bytes, self._num_holders):
            os.unlink(path)
            raise Overloaded("too many models' files are in use at this gateway; try again")
        for evicted in self._lru.evict_for(num_bytes, tenant, self._num_holders):
            self._files.pop(evicted).path.unlink()
        self._lru.add(file_id, tenant, num_bytes)
        self._files[file_id] = LocalFile(file_id, Path(path), num_bytes)
        return self._files[file_id]


def _locked_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it."""
    made = Path(tempfile.mkdtemp(prefix="torchrelay-"))
    descriptor = os.open(made, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return made.rename(f"{made}{FOLDER_SUFFIX}"), descriptor  # not named like a leftover before it is locked


def _remove_leftovers() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"torchrelay-*{FOLDER_SUFFIX}"):
        with suppress(OSError):  # another user's, in use, or just removed by another gateway
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)

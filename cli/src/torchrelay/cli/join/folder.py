"""The folder of a machine that has joined: the logs, data and addresses of its store and workers, and their locks.

Several programs on one machine may have joined. A lock decides which of them runs the machine's store; when that
program ends, even by SIGKILL, another takes over.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from torchrelay.cli.errors import CliError

_RETRY_S = 0.5


class NodeFolder:
    """Folders that only their owner can read. Raises ``CliError`` when they cannot be made, or are another user's."""

    def __init__(self, path: Path) -> None:
        self.path, self.run, self.logs, self.store = path, path / "run", path / "logs", path / "store"
        try:
            for folder in (path, self.run, self.logs, self.store):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
        except OSError as error:
            raise CliError(f"{path} cannot be used: {error.strerror}", "choose another folder with --home") from error
        if status.st_uid != os.getuid() or status.st_mode & 0o077:  # anyone could have made it in /tmp
            raise CliError(f"{path} can be used by others", "choose another folder with --home, or remove this one")

    @contextmanager
    def worker_locked(self, worker_id: str) -> Iterator[None]:
        """Keeps the id for this program. Raises ``CliError`` while another runs this worker."""
        with (self.run / f"{worker_id}.lock").open("a") as file:
            if not _try_lock(file.fileno()):
                raise CliError(
                    f"{worker_id} runs on this machine already",
                    "stop the other `torchrelay join`, or choose another --worker-id",
                )
            yield

    @asynccontextmanager
    async def store_locked(self) -> AsyncIterator[None]:
        """Waits until no other program runs this machine's store."""
        with (self.run / "store.lock").open("a") as file:
            while not _try_lock(file.fileno()):  # noqa: ASYNC110  a blocking lock needs a thread that nothing ends
                await asyncio.sleep(_RETRY_S)
            yield

    def store_port(self, host: str) -> int:
        """The port of this machine's store, the same for all its programs and for a store that takes over."""
        with (self.run / "store.port").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if text := file.read():
                return int(text)
            with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                port: int = probe.getsockname()[1]
            file.write(str(port))
            return port


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

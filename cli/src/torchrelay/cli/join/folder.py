"""The folder of a machine that has joined: the logs, data and addresses of its store and workers, and their locks.

Several programs on one machine may have joined. A lock decides which of them runs the machine's store; when that
program ends, even by SIGKILL, another takes over.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from torchrelay.cli.errors import CliError

_RETRY_S = 0.5


def make_private(path: Path) -> Path:
    """Makes a folder that only its owner can use. Raises ``CliError`` if it cannot be made, or is another user's."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_own and not status.st_mode & 0o022:  # nobody else can have changed it
            path.chmod(0o700)
            return path
    except OSError as error:
        raise CliError(f"{path} cannot be used: {error.strerror}", "choose another folder with --home") from error
    # Anyone could have made it in /tmp.
    raise CliError(f"{path} can be used by others", "choose another folder with --home, or remove this one")


class NodeFolder:
    """Folders that only their owner can read. Raises ``CliError`` when they cannot be made, or are another user's."""

    def __init__(self, path: Path) -> None:
        self.path, self.run, self.logs, self.store = make_private(path), path / "run", path / "logs", path / "store"
        self.remote = path / "remote"  # for packs of a cluster whose remote store this machine does not reach
        for folder in (self.run, self.logs, self.store):
            make_private(folder)

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
    async def store_locked(self) -> AsyncIterator[bool]:
        """Waits until no other program runs this machine's store; gives whether another did."""
        with (self.run / "store.lock").open("a") as file:
            was_taken = False
            while not _try_lock(file.fileno()):
                was_taken = True
                await asyncio.sleep(_RETRY_S)
            yield was_taken

    def choose_store_port(self, host: str, worker_ids: Collection[str]) -> int:
        """Returns the port of this machine's store, the same for all its programs and for a store that takes over.

        Without another program than that of ``worker_ids``, a port that is taken is replaced.
        """
        with (self.run / "store.port").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if text and (not self._is_alone(worker_ids) or _is_free(host, int(text))):
                return int(text)
            with socket.create_server((host, 0), family=_family(host)) as probe:
                port: int = probe.getsockname()[1]
            file.truncate(0)
            file.write(str(port))
            return port

    def _is_alone(self, worker_ids: Collection[str]) -> bool:
        """Whether no other program runs workers or the store of this machine."""
        own = {f"{worker_id}.lock" for worker_id in worker_ids}
        for path in self.run.glob("*.lock"):
            if path.name not in own:
                with path.open("a") as file:
                    if not _try_lock(file.fileno()):
                        return False
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError:
        return False
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

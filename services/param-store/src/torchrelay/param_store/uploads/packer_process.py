"""Runs the packer, one process per commit."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrelay.common.disk import write_error
from torchrelay.common.errors import Overloaded, TorchrelayError, UploadRefused
from torchrelay.common.process.environment import plain_environment


@dataclass(frozen=True, slots=True)
class PackProgress:
    """``stage`` is "validate" or "pack"; the bytes are the pack's."""

    stage: str
    num_bytes_done: int
    num_bytes_total: int


@dataclass(frozen=True, slots=True)
class PackJob:
    """The packer writes the pack to ``pack_path`` and its manifest beside it, with the suffix .manifest."""

    folder: Path
    pack_path: Path
    largest_slot_bytes: int
    memory_bytes: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()


class PackerQueue:
    """Runs one packer at a time, to bound memory; a limited number of commits may wait."""

    def __init__(self, max_waiting: int) -> None:
        self._turn = asyncio.Lock()
        self._max_waiting = max_waiting
        self._num_waiting = 0

    @asynccontextmanager
    async def acquired(self) -> AsyncIterator[None]:
        """Waits for its turn and holds it in the block. Raises ``Overloaded`` if too many wait."""
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"too many commits are waiting for the packer: {self._num_waiting}", retry_after_s=10.0)
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._turn.release()


async def run_packer(job: PackJob) -> AsyncGenerator[PackProgress, None]:
    """Validates and packs; the pack is complete when the iteration ends. Closing the iterator kills the packer.

    Raises ``UploadRefused`` for what is wrong with the upload, ``Unavailable`` for what is wrong with this machine.
    """
    command = (sys.executable, "-m", "torchrelay.param_store.packer")
    # On import, OpenBLAS takes memory for every core; numpy's linear algebra is not used here.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**plain_environment(os.environ), "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(job.encode())
        process.stdin.write_eof()
        async for encoded in process.stdout:
            line = json.loads(encoded)
            if "stage" in line:
                yield PackProgress(line["stage"], line["done"], line["total"])
            else:
                _check_result(line, job.pack_path.parent)
                return
        raise TorchrelayError(f"the packer exited early with status {await process.wait()}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _check_result(line: dict[str, Any], folder: Path) -> None:
    if refused := line.get("refused"):
        file, detail = refused["file"], refused["detail"]
        raise UploadRefused(f"{file}: {detail}" if file else detail, field=file or None)
    if failed := line.get("failed"):
        raise write_error(OSError(failed["errno"], failed["detail"]), "the upload could not be packed", folder)

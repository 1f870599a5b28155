"""Runs the packer, one process per commit, and the queue of commits."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchrelay.common.errors import InvalidRequest, Overloaded, TorchrelayError, Unavailable, UploadRefused
from torchrelay.common.host.disk import write_error
from torchrelay.common.process.environment import plain_environment
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.packer.core import QUANTIZE

log = get_logger(__name__)
_END_LIMIT_S = 5.0  # for a killed packer to end
_STUCK = "an earlier commit waits for this host's disk or the remote store; commit again once that responds"


@dataclass(frozen=True, slots=True)
class PackProgress:
    """``stage`` is "wait", "validate", "pack" or "publish". The bytes are the pack's, in stage "wait" the upload's."""

    stage: str
    num_bytes_done: int
    num_bytes_total: int
    notes: tuple[str, ...] = ()  # of "validate": sentences about weights that are converted or left out


@dataclass(frozen=True, slots=True)
class PackJob:
    """A job: the packer writes the pack to ``pack_path`` and its manifest to the same path with suffix .manifest.

    With ``base_config``, the config.json of a base model with weights in ``base_dtype``, the folder holds an adapter of
    it, which is only checked. ``quantize``: "int8", or empty.
    """

    folder: Path
    pack_path: Path
    largest_slot_bytes: int
    memory_bytes: int
    base_config: dict[str, Any] | None = None
    base_dtype: str = ""
    base_is_opaque: bool = False
    engines: tuple[str, ...] = ()  # that may compute the model; none: they are not known
    quantize: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()


@dataclass(slots=True, eq=False)
class Turn:
    """A tenant's commit in a queue, to pack or to publish."""

    tenant_id: str
    decided: asyncio.Event = field(default_factory=asyncio.Event)  # it runs, or will never run
    is_stuck: bool = False  # it has exceeded its time limit and cannot be ended
    packer_end: asyncio.Task[int] | None = None  # waits for the packer's exit, once it was killed


class CommitQueue:
    """Runs a few commits at a time, to bound memory and threads, and one per tenant: a tenant's commits wait for at
    most one commit of another tenant, unless as many tenants commit as may run. A limited number of commits may wait,
    but not for stuck commits.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: list[Turn] = []
        self._waiting: list[Turn] = []  # in order of arrival

    @asynccontextmanager
    async def acquired(self, tenant_id: str) -> AsyncIterator[Turn]:
        """Waits for a turn and keeps it for the block, and until its packer has ended.

        Raises ``Overloaded`` if too many commits wait, ``Unavailable`` like ``acquire``.
        """
        self._check(tenant_id)
        turn = Turn(tenant_id)
        try:
            await self.acquire(turn)
            yield turn
        finally:
            if turn.packer_end is None or turn.packer_end.done():
                self.release(turn)
            else:
                log.warning("packer_not_ended", tenant_id=tenant_id)
                self.give_up(turn)
                turn.packer_end.add_done_callback(lambda _: self.release(turn))

    async def acquire(self, turn: Turn) -> None:
        """Waits for the turn, however many commits wait. It must be released even if this raises.

        Raises ``Unavailable`` if the commits that it waits for are stuck.
        """
        self._waiting.append(turn)
        self._grant()
        await turn.decided.wait()
        if turn in self._waiting:
            raise Unavailable(_STUCK)

    def check_stuck(self, tenant_id: str) -> None:
        """Raises ``Unavailable`` if a commit of the tenant would wait for stuck commits."""
        if self._waits_for_stuck(tenant_id):
            raise Unavailable(_STUCK)

    def give_up(self, turn: Turn) -> None:
        """Marks a turn as stuck: it occupies its slot until it is released, but no commit waits for it any more."""
        turn.is_stuck = True
        self._grant()

    def release(self, turn: Turn) -> None:
        """Releases a turn; no effect if it was never acquired."""
        for turns in (self._running, self._waiting):
            if turn in turns:
                turns.remove(turn)
        self._grant()

    def _check(self, tenant_id: str) -> None:
        num_own, most_own = sum(turn.tenant_id == tenant_id for turn in self._waiting), max(self._max_waiting // 4, 1)
        if len(self._waiting) >= self._max_waiting or num_own >= most_own:
            text = f"too many commits are waiting for the packer: {len(self._waiting)}, {num_own} of them this tenant's"
            raise Overloaded(text, retry_after_s=10.0)

    def _grant(self) -> None:
        for turn in tuple(self._waiting):
            is_free = len(self._running) < self._max_running
            if is_free and all(other.tenant_id != turn.tenant_id for other in self._running):
                self._waiting.remove(turn)
                self._running.append(turn)
                turn.decided.set()
        for turn in self._waiting:
            if self._waits_for_stuck(turn.tenant_id):
                turn.decided.set()

    def _waits_for_stuck(self, tenant_id: str) -> bool:
        stuck = [turn.tenant_id for turn in self._running if turn.is_stuck]
        return tenant_id in stuck or len(stuck) == self._max_running


async def run_packer(job: PackJob, stall_s: float, turn: Turn) -> AsyncGenerator[PackProgress, None]:
    """Validates and packs; the pack is complete when the iteration ends. Closing the iterator kills the packer and sets
    ``turn.packer_end``, which is not done while the packer survives.

    Raises ``UploadRefused`` for faults of the upload, ``InvalidRequest`` for one that cannot be quantized,
    ``Unavailable`` for faults of this machine, or if the packer makes no progress for ``stall_s``.
    """
    command = (sys.executable, "-m", "torchrelay.param_store.packer")
    # On import, OpenBLAS allocates memory for every core; numpy's linear algebra is not used here.
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
        while encoded := await _next_line(process.stdout, stall_s):
            line = json.loads(encoded)
            if "stage" in line:
                yield PackProgress(line["stage"], line["done"], line["total"], tuple(line.get("notes", ())))
            else:
                _check_result(line, job.pack_path.parent)
                return
        raise TorchrelayError(f"the packer exited early with status {await process.wait()}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        turn.packer_end = asyncio.create_task(process.wait())
        # The kernel cannot end a process that waits for a disk.
        await asyncio.wait({turn.packer_end}, timeout=_END_LIMIT_S)


async def _next_line(stdout: asyncio.StreamReader, stall_s: float) -> bytes:
    try:
        async with asyncio.timeout(stall_s):
            return await stdout.readline()
    except TimeoutError:
        raise Unavailable(
            f"the packer made no progress for {stall_s:g} s and was ended; commit again, or check this host's disk"
        ) from None


def _check_result(line: dict[str, Any], folder: Path) -> None:
    if refused := line.get("refused"):
        file, detail = refused["file"], refused["detail"]
        if file == QUANTIZE:  # the upload is valid without it
            raise InvalidRequest(detail, field=file)
        raise UploadRefused(f"{file}: {detail}" if file else detail, field=file or None)
    if failed := line.get("failed"):
        raise write_error(OSError(failed["errno"], failed["detail"]), "the upload could not be packed", folder)

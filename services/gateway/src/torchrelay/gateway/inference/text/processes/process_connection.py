"""The gateway's end of a text process: its start, its socket, its end."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import msgspec

from torchrelay.gateway.inference.text.processes.frames import (
    LENGTH_BYTES,
    MAX_ANSWER_BYTES,
    Answer,
    FileId,
    Load,
    TextLimits,
    frame_of,
)

PROCESS_SCRIPT: Final = Path(__file__).with_name("text_process.py")
# An arena of memory for each thread would take 64 MB of the address space.
ENVIRONMENT: Final = {
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
}
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
PIECE_BYTES = 256 << 10  # of a file in memory at once
_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A version's file on this machine."""

    id: FileId
    path: Path
    num_bytes: int


class ProcessEnded(Exception):
    """The process has ended before it answered; ``status`` as ``subprocess`` gives it: the negative signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the text process ended with {status}")
        self.status = status


class TextProcess(asyncio.Protocol):
    """Takes one command at a time. ``lost`` is done once the process has closed its end."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Answer] | None = None
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def start(cls, limits: TextLimits, niceness: int = 0) -> TextProcess:
        """Starts a process that takes commands. Raises ``ProcessEnded``, ``OSError`` or ``TimeoutError``."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        started = cls()
        ready = started._expect()
        try:
            with theirs:
                ours.setblocking(False)
                await loop.create_unix_connection(lambda: started, sock=ours)
                started._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-B", str(PROCESS_SCRIPT)),
                    *(msgspec.json.encode(limits).decode(), str(niceness)),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    cwd="/",
                    env=ENVIRONMENT,
                )
            async with asyncio.timeout(START_TIMEOUT_S):
                await started.wait_answer(ready)
        except BaseException:
            await started.end()
            raise
        return started

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ask(self, frame: bytes) -> asyncio.Future[Answer]:
        """Sends a command that is answered. The future fails with ``ConnectionError`` when the process is gone."""
        answer = self._expect()
        if self.lost.done():
            self._lose_answer()
        else:
            self.tell(frame)
        return answer

    def tell(self, frame: bytes) -> None:
        """Sends a command that is not answered."""
        assert self._transport is not None
        self._transport.write(frame)

    async def load(self, file: LocalFile) -> Answer:
        """Sends a file. Raises ``ProcessEnded``, or ``OSError`` if it cannot be read."""
        with file.path.open("rb") as opened:
            answer = self.ask(frame_of(Load(file.id, file.num_bytes)))
            while piece := opened.read(PIECE_BYTES):
                await self._can_write.wait()
                self.tell(piece)
        return await self.wait_answer(answer)

    async def wait_answer(self, answer: asyncio.Future[Answer]) -> Answer:
        """Raises ``ProcessEnded``."""
        try:
            return await answer
        except ConnectionError:
            raise ProcessEnded(await self.end()) from None

    async def end(self) -> int:
        """Kills the process, if it has not ended by itself; returns its status."""
        is_ending = self.lost.done()
        if self._transport is not None:
            self._transport.abort()
        if self._process is None:
            return 0
        if is_ending:
            # Not killed as well: asyncio would then reap it itself and lose its status.
            with suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    return await self._process.wait()
        self.kill()
        return await self._process.wait()

    def ran_ns(self) -> int:
        """How long the process has run on a core, if the system reports that; otherwise the clock."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0])
        except (OSError, ValueError):
            return time.monotonic_ns()

    def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()

    # What the transport calls:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
            if end > MAX_ANSWER_BYTES:
                self.kill()
                return
            if len(received) < end:
                return
            encoded = bytes(received[LENGTH_BYTES:end])
            del received[:end]
            self._answered(encoded)

    def connection_lost(self, exc: Exception | None) -> None:
        self._can_write.set()
        self.lost.set_result(None)
        self._lose_answer()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _expect(self) -> asyncio.Future[Answer]:
        assert self._answer is None, "one command at a time"
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def _lose_answer(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionResetError("the text process is gone"))

    def _answered(self, encoded: bytes) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            self.kill()  # an answer without a command
            return
        try:
            answer.set_result(_DECODER.decode(encoded))
        except msgspec.DecodeError as error:
            self.kill()
            answer.set_exception(ConnectionAbortedError(str(error)))

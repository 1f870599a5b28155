"""Chat templates are code of strangers: they run in a child process that can be killed, with little time and memory."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from cachetools import TTLCache

from torchrelay.common.errors import InvalidRequest, Unavailable
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)

# Run as a script, never imported: the gateway does not even load Jinja2.
PROCESS_SCRIPT = Path(__file__).with_name("template_process.py")
MAX_MEMORY_BYTES = 512 << 20
MAX_OUTPUT_CHARS = 8 << 20
BAN_S = 60.0
MAX_BANNED = 1024


class _Reply(msgspec.Struct):
    text: str | None = None
    error: str = ""


class TemplateRenderer:
    """Renders one template at a time in one child, which is started when first needed and again after a kill.

    A template that had to be killed is refused for a minute: it shall not hold up the others again and again.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._banned: TTLCache[bytes, bool] = TTLCache(MAX_BANNED, BAN_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._lock:
            await self._kill()

    async def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises ``InvalidRequest`` about ``messages`` for whatever the template does wrong."""
        name = blake2b(template.encode(), digest_size=16).digest()
        if name in self._banned:
            raise self._too_long()
        job = msgspec.json.encode({"template": template, "variables": variables}) + b"\n"
        async with self._lock:
            try:
                child = await self._living()
                async with asyncio.timeout(self._timeout_s):
                    line = await self._ask(child, job)
            except TimeoutError:
                await self._kill()
                self._ban(name)
                raise self._too_long() from None
            except asyncio.CancelledError:
                await self._kill()  # its answer would be taken for the next job's
                raise
            if not line.endswith(b"\n"):
                await self._kill()
                self._ban(name)
                raise InvalidRequest("the model's chat template failed: it needs too much", field="messages")
        try:
            reply = msgspec.json.decode(line, type=_Reply)
        except msgspec.DecodeError as error:  # halves of characters: no text at all
            raise InvalidRequest("the model's chat template failed: it makes no text", field="messages") from error
        if reply.text is None:
            raise InvalidRequest(f"the model's chat template failed: {reply.error}", field="messages")
        return reply.text

    async def _ask(self, child: asyncio.subprocess.Process, job: bytes) -> bytes:
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(job)
            await child.stdin.drain()
            return await child.stdout.readline()
        except (ConnectionError, ValueError):  # it died before it read the job, or its line has no end
            return b""

    async def _living(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await self._start()
            # Its start is not the template's time: wait until it has imported all it needs.
            if await self._ask(self._child, b'{"template": "", "variables": {}}\n') == b"":
                await self._kill()
                raise Unavailable("chat templates cannot be rendered now")
        return self._child

    @property
    def child_pid(self) -> int | None:
        """The process id of the child, while one runs."""
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    async def _start(self) -> asyncio.subprocess.Process:
        limits = (MAX_MEMORY_BYTES, math.ceil(self._timeout_s), MAX_OUTPUT_CHARS)
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-B", str(PROCESS_SCRIPT), *map(str, limits)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd="/",
                env={"LANG": "C.UTF-8", "PYTHONUTF8": "1"},
                limit=MAX_OUTPUT_CHARS * 12 + 1024,  # each character as \\uXXXX\\uXXXX at worst
            )
        except OSError as error:
            raise Unavailable(f"chat templates cannot be rendered now: {error}") from error

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()

    def _ban(self, name: bytes) -> None:
        log.warning("template_killed", template=name.hex())
        self._banned[name] = True

    def _too_long(self) -> InvalidRequest:
        return InvalidRequest(
            f"the model's chat template failed: it takes longer than {self._timeout_s:g} s", field="messages"
        )

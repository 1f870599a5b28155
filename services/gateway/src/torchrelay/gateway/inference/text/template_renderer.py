"""Renders chat templates, which are untrusted code, in a child process with limited time and memory."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
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
    """Renders one template at a time in one child process, started on demand and again after a kill.

    A template whose process had to be killed is rejected for a minute, so that it cannot keep delaying the others.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._banned: TTLCache[bytes, bool] = TTLCache(MAX_BANNED, BAN_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        async with self._lock:
            await self._kill()

    async def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises ``InvalidRequest`` about ``messages`` if the template fails."""
        name = blake2b(template.encode(), digest_size=16).digest()
        if name in self._banned:
            raise self._timed_out()
        job = msgspec.json.encode({"template": template, "variables": variables}) + b"\n"
        async with self._lock:
            try:
                child = await self._ensure_child()
                async with asyncio.timeout(self._timeout_s):
                    line = await self._exchange(child, job)
            except TimeoutError:
                await self._ban(name)
                raise self._timed_out() from None
            except asyncio.CancelledError:
                await self._kill()  # its answer would be read as the next job's
                raise
            if not line.endswith(b"\n"):
                await self._ban(name)
                raise _failed("it exceeded its CPU, memory or output limit")
        try:
            reply = msgspec.json.decode(line, type=_Reply)
        except msgspec.DecodeError as error:  # e.g. lone surrogates
            raise _failed("its output is not valid text") from error
        if reply.text is None:
            raise _failed(reply.error)
        return reply.text

    async def _exchange(self, child: asyncio.subprocess.Process, job: bytes) -> bytes:
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(job)
            await child.stdin.drain()
            return await child.stdout.readline()
        except (ConnectionError, ValueError):  # it died before reading the job, or its line exceeds the limit
            return b""

    async def _ensure_child(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await self._start()
            # Its startup must not count towards the template's time limit.
            if await self._exchange(self._child, b'{"template": "", "variables": {}}\n') == b"":
                await self._kill()
                raise Unavailable("chat templates cannot be rendered at the moment")
        return self._child

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
            raise Unavailable(f"cannot start the chat template process: {error}") from error

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()

    async def _ban(self, name: bytes) -> None:
        await self._kill()
        log.warning("template_killed", template=name.hex())
        self._banned[name] = True

    def _timed_out(self) -> InvalidRequest:
        return _failed(f"it took longer than {self._timeout_s:g} s")


def _failed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template failed: {reason}", field="messages")

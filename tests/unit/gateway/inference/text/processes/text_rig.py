"""Text processes with files in a folder, and prompts whose token ids are read back as text."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import tiny_tokenizer
from torchrelay.gateway.inference.text.processes.frames import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Answer,
    Prompt,
    TextLimits,
    TokenIds,
)
from torchrelay.gateway.inference.text.processes.process_connection import LocalFile
from torchrelay.gateway.inference.text.processes.text_pool import PoolSettings
from torchrelay.gateway.inference.text.processes.text_processes import TextProcesses

TINY = tiny_tokenizer()
CONFIG = json.dumps({"bos_token": "<s>"}).encode()
MESSAGES: tuple[dict[str, str], ...] = (
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "größer?\nJa 🔥"},
)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@dataclass(frozen=True)
class TextRig:
    """Processes and the folder of their files."""

    processes: TextProcesses
    folder: Path

    def file(self, name: str, encoded: bytes) -> LocalFile:
        digest = blake3(encoded).hexdigest()
        path = self.folder / digest
        path.write_bytes(encoded)
        return LocalFile((name, digest), path, len(encoded))

    async def answer(
        self,
        template: str = "",
        *,
        tenant: str = "acme",
        model: str = "acme/echo",
        messages: tuple[dict[str, Any], ...] = MESSAGES,
        continues_last: bool = False,
        tokenizer: bytes = TINY,
        text: str | None = None,
        max_tokens: int = 1 << 20,
        max_chars: int = 1 << 20,
        vocab_size: int = 1 << 20,
    ) -> Answer:
        """``messages`` through ``template``, or else ``text``."""
        files = [self.file(TOKENIZER, tokenizer)]
        if text is None:
            files += [self.file(TOKENIZER_CONFIG, CONFIG), self.file(CHAT_TEMPLATE, template.encode())]
        prompt = Prompt(
            files=tuple(file.id for file in files),
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            max_chars=max_chars,
            messages=None if text is not None else messages,
            continues_last=continues_last,
            text=text or "",
        )
        return await self.processes.run(tenant, model, prompt, files)

    async def rendered(self, template: str, **prompt: Any) -> str:
        return self.text(await self.answer(template, **prompt))

    @staticmethod
    def text(answer: Answer, tokenizer: bytes = TINY) -> str:
        """The text of the token ids in ``answer``."""
        assert isinstance(answer, TokenIds), answer
        ids = list(array("i", answer.packed))
        text: str = Tokenizer.from_str(tokenizer.decode()).decode(ids, skip_special_tokens=False)
        return text


@asynccontextmanager
async def text_rig(
    folder: Path,
    *,
    num_processes: int = 2,
    prompt_cpu_s: float = 0.2,
    load_cpu_s: float = 5.0,
    max_memory_bytes: int = 1 << 30,
    max_cached_bytes: int = 96 << 20,
    max_wait_s: float = 60.0,
    idle_s: float = 60.0,
    hung_s: float = 30.0,
) -> AsyncIterator[TextRig]:
    limits = TextLimits(prompt_cpu_s, load_cpu_s, max_memory_bytes)
    pool = PoolSettings(num_processes, max_cached_bytes, max_wait_s=max_wait_s, idle_s=idle_s, hung_s=hung_s)
    async with TextProcesses(limits, pool) as processes:
        yield TextRig(processes, folder)

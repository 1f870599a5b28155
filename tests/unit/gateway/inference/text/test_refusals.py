from __future__ import annotations

import signal

import pytest

from torchrelay.gateway.inference.text.processes.frames import TextLimits
from torchrelay.gateway.inference.text.processes.text_pool import PromptKilled
from torchrelay.gateway.inference.text.refusals import kill_error


@pytest.mark.parametrize(
    ("end", "loading", "field", "words"),
    [
        (signal.SIGPROF, None, "messages", "chat template failed: it took longer than 2 s"),
        (signal.SIGVTALRM, None, "messages", "tokenizer took longer than 2 s for this text"),
        (signal.SIGPROF, "tokenizer.json", "tokenizer.json", "takes more than 10 s of CPU to load"),
        (
            signal.SIGABRT,
            None,
            "messages",
            "chat template, tokenizer or format of the answer exceeded the limit of 1024 MB of memory",
        ),
        (signal.SIGSEGV, "tokenizer.json", "tokenizer.json", "tokenizer.json exceeded the limit of 1024 MB of memory"),
        (signal.SIGKILL, None, None, "the process that tokenized the prompt was killed"),
    ],
)
def test_kill_error_names_the_exceeded_limit(
    end: signal.Signals, loading: str | None, field: str | None, words: str
) -> None:
    error = kill_error(PromptKilled(-end, loading), TextLimits(), "messages")
    assert words in error.message and error.field == field
    assert error.http_status == (503 if end == signal.SIGKILL else 400)

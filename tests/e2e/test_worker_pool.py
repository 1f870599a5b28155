"""`up --workers 0..2`: worker processes run only while requests need them; every answer is exact and billed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tenants import SMALL, reference
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.platform import Platform, running_platform
from tests.support.wait import wait_until
from torchrelay.cli.api.client import GatewayClient

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 42))  # less than a page: nothing of it is cached
NUM_TOKENS = 8


def worker_processes(platform: Platform) -> list[str]:
    """Pids of the worker processes of its `up`, starting ones included."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "comm").read_text().strip()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == platform.process.pid and name == "torchrelay-worker"[:15]:  # as far as the kernel keeps it
            pids.append(path.name)
    return pids


def completion_tokens(platform: Platform, key: str, model: str) -> list[int]:
    answer = complete(platform, key, model, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def billed(platform: Platform, key: str) -> tuple[int, int]:
    """Prompt and completion tokens."""
    total: dict[str, Any] = http.get(f"{platform.http}/v1/usage", headers=headers(key)).json()["total"]
    return total["prompt_tokens"], total["completion_tokens"]


def test_workers_run_only_while_requests_need_them(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama")
    expected = reference(checkpoint, PROMPT, NUM_TOKENS)
    with running_platform(tmp_path / "home", (*SMALL, "--workers", "0..2", "--idle-timeout-s", "600")) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, checkpoint, "llama")
        assert not worker_processes(platform)
        assert completion_tokens(platform, key, model) == expected
        assert billed(platform, key) == (len(PROMPT), NUM_TOKENS)
        assert worker_processes(platform), "its model is still loaded"
        with GatewayClient(platform.http, key) as client:
            client.call("PATCH", f"/v1/models/{model}", json={"idle_timeout_s": 1})
        assert completion_tokens(platform, key, model) == expected, "this request carries the setting to the scheduler"
        wait_until(lambda: not worker_processes(platform), "the end of the worker processes")
        assert completion_tokens(platform, key, model) == expected
        assert billed(platform, key) == (3 * len(PROMPT), 3 * NUM_TOKENS)

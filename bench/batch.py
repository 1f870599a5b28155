"""Batches beside interactive requests, and alone: what they cost others, and how much of the platform they use.

    python bench/batch.py [--quick]

`torchrelay up` runs a prefill and a decode worker. A client sends short requests of the class interactive, one after
another: with nobody else, then while a batch runs. A second batch has the platform for itself, and its tokens per
second, from its creation to its end, are compared with those of direct requests with the same sizes and class, of
which as many are under way at once as a gateway runs of a batch.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.batches import begin_batch
from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, percentile, progress
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import headers
from tests.support.platform import Platform, running_platform
from torchrelay.cli.api.client import GatewayClient
from torchrelay.gateway.settings import GatewaySettings

AT_ONCE: int = GatewaySettings.model_fields["batch_lines_at_once"].default
PROMPT_TOKENS, LINE_TOKENS, INTERACTIVE_TOKENS = 32, 64, 16
TIMEOUT_S, POLL_S = 300.0, 0.1
OPTIONS = ("--arena-mb", "256", "--kv-pool-mb", "64", "--threads", "1", "--quiet")


@dataclass(frozen=True, slots=True)
class Form:
    num_lines: int
    num_alone: int  # interactive requests with nobody else
    order: str  # of batches (b) and direct requests (d) with nobody else: the full one evens out a steady drift


FULL, QUICK = Form(1000, 300, "bddb"), Form(200, 80, "bd")


class Bench:
    """The platform with a model, and requests of random prompts."""

    def __init__(self, platform: Platform, folder: Path) -> None:
        self._key = platform.tenant("acme")
        checkpoint = make_checkpoint(folder / "model", "llama", **LLAMA_33MB)
        self._model = platform.upload(self._key, checkpoint, "model")
        self._url, self._numbers = platform.http, random.Random(0)

    def body(self, num_tokens: int, **options: Any) -> dict[str, Any]:
        prompt = [self._numbers.randrange(250) for _ in range(PROMPT_TOKENS)]
        return {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **options}

    def interactive_s(self, goes_on: Callable[[int], bool]) -> list[float]:
        """Seconds of requests one after another, while ``goes_on`` of their number is true."""
        took_s: list[float] = []
        with httpx.Client(base_url=self._url, headers=headers(self._key), timeout=TIMEOUT_S) as client:
            while goes_on(len(took_s)):
                body = self.body(INTERACTIVE_TOKENS, service_tier="priority")
                begin_s = time.monotonic()
                client.post("/v1/completions", json=body).raise_for_status()
                took_s.append(time.monotonic() - begin_s)
        return took_s

    def batch(self, num_lines: int, beside: Callable[[Callable[[], bool]], None] | None = None) -> float:
        """Seconds from the creation of a batch to its end; ``beside`` runs from its first result, and gets whether
        the batch runs.
        """
        with GatewayClient(self._url, self._key) as client:
            batch_id = begin_batch(client, [self.body(LINE_TOKENS) for _ in range(num_lines)])
            begin_s = time.monotonic()

            def seen() -> dict[str, Any]:
                batch = client.call("GET", f"/v1/batches/{batch_id}")
                assert batch["status"] in ("validating", "in_progress", "finalizing", "completed"), batch
                assert not batch["request_counts"]["failed"], batch
                return batch

            while seen()["request_counts"]["completed"] == 0:
                time.sleep(POLL_S)
            if beside is not None:
                beside(lambda: bool(seen()["status"] == "in_progress"))
            while seen()["status"] != "completed":
                time.sleep(POLL_S)
            return time.monotonic() - begin_s

    async def direct_s(self, num_requests: int) -> float:
        """Seconds of requests like the lines of a batch, ``AT_ONCE`` at a time."""
        bodies = iter([self.body(LINE_TOKENS, service_tier="flex") for _ in range(num_requests)])
        limits = httpx.Limits(max_connections=AT_ONCE)
        begin_s = time.monotonic()
        async with httpx.AsyncClient(
            base_url=self._url, headers=headers(self._key), timeout=TIMEOUT_S, limits=limits
        ) as client:

            async def ask() -> None:
                for body in bodies:
                    (await client.post("/v1/completions", json=body)).raise_for_status()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(ask())
        return time.monotonic() - begin_s


def main() -> None:
    is_quick = parser_of(__doc__, "batches of 200 lines, under 50 s").parse_args().quick
    form = QUICK if is_quick else FULL
    beside_s: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrelay-bench-")))
        bench = Bench(stack.enter_context(running_platform(folder / "home", OPTIONS)), folder)
        bench.interactive_s(lambda number: number < 5)
        alone_s = bench.interactive_s(lambda number: number < form.num_alone)
        progress(f"{len(alone_s)} interactive requests with nobody else")
        bench.batch(form.num_lines, lambda runs: beside_s.extend(bench.interactive_s(lambda _: runs())))
        progress(f"{len(beside_s)} beside a batch")
        took_s = {"b": 0.0, "d": 0.0}
        for kind in form.order:
            num = form.num_lines
            kind_s = bench.batch(num) if kind == "b" else asyncio.run(bench.direct_s(num))
            progress(f"{'a batch' if kind == 'b' else 'direct requests'} with nobody else: {kind_s:.1f} s")
            took_s[kind] += kind_s
    num_tokens = form.num_lines * LINE_TOKENS * len(form.order) / 2
    batch_tok_s, direct_tok_s = num_tokens / took_s["b"], num_tokens / took_s["d"]
    alone_p95_s, beside_p95_s = percentile(alone_s, 95), percentile(beside_s, 95)
    alone = f"P95 alone {1e3 * alone_p95_s:.0f} ms, beside {1e3 * beside_p95_s:.0f} ms"
    direct = f"{direct_tok_s:.0f} tokens/s of {AT_ONCE} direct requests at once"
    checks = [
        Check("interactive_p95_ratio", beside_p95_s / alone_p95_s, "x", 1.1, alone),
        Check("batch_share_of_idle", batch_tok_s / direct_tok_s, "x", 0.9, direct, at_least=True),
        Check("interactive_p50_ratio", percentile(beside_s, 50) / percentile(alone_s, 50), "x"),
        Check("interactive_beside", len(beside_s), "", 10, "requests while the batch ran", at_least=True),
        Check("batch_tok_s", batch_tok_s, "tok/s"),
    ]
    conditions = {"quick": is_quick, "lines": form.num_lines, "line_tokens": LINE_TOKENS}
    conditions |= {"interactive_tokens": INTERACTIVE_TOKENS, "prompt_tokens": PROMPT_TOKENS}
    finish("batch", conditions, checks)


if __name__ == "__main__":
    main()

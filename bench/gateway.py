"""CPU of the gateway process per streamed token, with workers that echo behind the real gRPC streams.

    python bench/gateway.py [--quick]

The gateway runs as `torchrelay up` runs it: Redis, NATS, its SQL, traces into a file. Scheduler, store and workers echo
in a process of their own, and so does the client. Every token is an id out of 128,000 that the gateway turns into text,
and an event of its own. Twice: as fast as it goes, and paced like an engine with 20 ms steps, when nothing coalesces;
the bound holds for both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.echo_model import PROMPT_WORDS, VOCAB_SIZE, EchoVocabulary
from bench.processes import cpu_s
from bench.report import Check, finish, progress
from tests.support.brokers import nats_server, redis_server, running
from torchrelay.gateway.catalogue import Catalogue, Scaling
from torchrelay.gateway.core import Shape, Version
from torchrelay.gateway.freshness import TableVersions
from torchrelay.gateway.prices import Prices
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.tenants import Tenants

TOKENS = 64
CONCURRENCY = 64
STEP_S = 0.02
PATH = "/v1/completions"
ENDS = 3  # events of an answer that are no token: finish, usage, [DONE]
ADMIN = "tra-bench"
NUM_PROMPTS = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """One loaded interval."""

    cpu_s: float
    load: dict[str, Any]

    @property
    def us_per_token(self) -> float:
        return self.cpu_s * 1e6 / int(self.load["output_tokens"])

    @property
    def us_per_request(self) -> float:
        return self.cpu_s * 1e6 / int(self.load["requests"])

    @property
    def requests_per_s(self) -> float:
        return float(self.load["requests"] / self.load["seconds"])


@contextmanager
def child(module: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A program of this folder that talks by its standard streams; it ends when its input does."""
    command = [sys.executable, "-m", f"bench.{module}", *args]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    raise RuntimeError(f"{process.args!r} ended with {process.wait()}")


def set_step(echo: subprocess.Popen[str], step_s: float) -> None:
    assert echo.stdin is not None
    echo.stdin.write(f"{step_s}\n")
    echo.stdin.flush()
    line_of(echo)


@contextmanager
def gateway(home: Path, echo: dict[str, str], redis_url: str, nats_url: str) -> Iterator[tuple[int, str]]:
    """The gateway's process and its REST address."""
    ready, port_url = home / "gateway.json", "http"
    settings = {
        "admin-key": ADMIN,
        "database-url": f"sqlite:///{home}/ledger.db",
        "redis-url": redis_url,
        "nats-url": nats_url,
        "scheduler-address": echo["scheduler"],
        "store-address": echo["store"],
        "trace-file": str(home / "traces.jsonl"),
        "ready-file": str(ready),
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    program = str(Path(sys.executable).with_name("torchrelay-gateway"))
    port = free_http_port()
    with running([program, *flags, "--http-port", str(port)], home / "gateway.log", port) as process:
        while not ready.exists():
            process.poll()
        yield process.pid, str(json.loads(ready.read_text())[port_url])


def free_http_port() -> int:
    from tests.support.brokers import free_port

    return free_port()

"""CPU of the gateway process per streamed token, with echo workers behind the real gRPC streams.

    python bench/gateway.py [--quick]

The gateway runs as `torchrelay up` runs it: Redis, NATS, SQLite, traces into a file. Scheduler, store and workers
are one echo process, the client another. Every token is an id out of 128,000 that the gateway decodes, and its own
event. Measured twice: as fast as possible, and with engine steps of 20 ms, between which the gateway sleeps and wakes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.processes import cpu_s
from bench.report import Check, finish, progress
from bench.streaming.echo_model import PROMPT_WORDS, VOCAB_SIZE, EchoVocabulary
from tests.support.brokers import free_port, nats_server, redis_server, running
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog, ScalingSettings
from torchrelay.gateway.core import ModelShape, Version
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 64
CONCURRENCY = 64
STEP_S = 0.02
PATH = "/v1/completions"
MODEL = "bench/echo"
ENDS = 2  # events of an answer that are not tokens: finish and usage
ADMIN_KEY = f"tra-{'0' * 32}"
NUM_PROMPTS = 512
LOAD_S = 120.0  # no load takes so long


@dataclass(frozen=True, slots=True)
class Sample:
    """One loaded interval."""

    cpu_s: float
    seconds: float
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    first_byte_p50_ms: float

    @property
    def us_per_token(self) -> float:
        return self.cpu_s * 1e6 / self.num_tokens


@dataclass(frozen=True, slots=True)
class GatewayUnderTest:
    """A server under load: its process, port and requests."""

    pid: int
    port: int
    key: str
    bodies: list[dict[str, Any]]

    def load(self, num_requests: int, ends: int = ENDS) -> Sample:
        """Raises ``RuntimeError`` unless every request returned all its tokens, each as its own event."""
        job = {
            "host": "127.0.0.1",
            "port": self.port,
            "path": PATH,
            "headers": {"Authorization": f"Bearer {self.key}"},
            "bodies": self.bodies,
            "num_requests": num_requests,
            "concurrency": CONCURRENCY,
        }
        begin = cpu_s(self.pid)
        command = [sys.executable, "-m", "bench.streaming.load"]
        encoded = json.dumps(job).encode()
        done = subprocess.run(command, cwd=ROOT, input=encoded, stdout=subprocess.PIPE, check=True, timeout=LOAD_S)
        used = cpu_s(self.pid) - begin
        said = json.loads(done.stdout)
        num_tokens = said["events"] - ends * num_requests
        claimed = said["output_tokens"] if ends == ENDS else num_tokens
        if said["num_errors"] or not num_tokens == claimed == num_requests * TOKENS:
            raise RuntimeError(f"not every token was an event of its own: {said}")
        return Sample(used, said["seconds"], num_requests, num_tokens, said["prompt_tokens"], said["first_byte_p50_ms"])


@contextmanager
def child(module: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A program of `streaming/` that communicates over its standard streams and ends with its input."""
    command = [sys.executable, "-m", f"bench.streaming.{module}", *args]
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


def read_json_line(process: subprocess.Popen[str]) -> Any:
    """Reads the next JSON line of a child."""
    assert process.stdout is not None
    if line := process.stdout.readline():
        return json.loads(line)
    raise RuntimeError(f"{process.args!r} ended with {process.wait()}")


def set_step(echo: subprocess.Popen[str], step_s: float) -> None:
    assert echo.stdin is not None
    echo.stdin.write(f"{step_s}\n")
    echo.stdin.flush()
    read_json_line(echo)


@contextmanager
def running_gateway(home: Path, echo: dict[str, str]) -> Iterator[tuple[int, int]]:
    """The gateway's process and its REST port."""
    port = free_port()
    with redis_server(home) as redis_url, nats_server(home) as nats_url:
        settings = {
            "http-port": str(port),
            "admin-key": ADMIN_KEY,
            "database-url": f"sqlite:///{home}/ledger.db",
            "redis-url": redis_url,
            "nats-url": nats_url,
            "scheduler-address": echo["scheduler"],
            "store-address": echo["store"],
            "trace-file": str(home / "traces.jsonl"),
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        program = str(Path(sys.executable).with_name("torchrelay-gateway"))
        with running([program, *flags], home / "gateway.log", port) as process:
            yield process.pid, port


def tenant_key(port: int) -> str:
    """Creates a key of the tenant ``bench`` over REST, as an operator would."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False) as client:
        client.post("/v1/tenants", json={"name": "bench"}).raise_for_status()
        key: str = client.post("/v1/keys", json={"tenant": "bench"}).raise_for_status().json()["key"]
        return key


async def publish(home: Path, tokenizer_digest: str) -> None:
    """Puts the model into the catalog directly: there is no store to pack it."""
    database = Database(f"sqlite:///{home}/ledger.db")
    table_versions = TableVersions(database, 0.5)
    catalog = Catalog(database, table_versions, Prices(database, table_versions))
    version = Version(
        version_id="v-echo",
        pack_id="0" * 64,
        pack_bytes=1 << 30,
        architecture="LlamaForCausalLM",
        dtype="BF16",
        shape=ModelShape(24, 8, 64, 2, 4096, VOCAB_SIZE),
        routing_block_tokens=64,
        stored_bytes=1 << 30,
        file_digests={"tokenizer.json": tokenizer_digest},
    )
    tenant = await Tenants(database).by_name("bench")
    async with database.write() as connection:
        await catalog.publish_in(connection, tenant.tenant_id, "echo", version, ScalingSettings())
    await database.close()


def bodies_of(vocabulary: EchoVocabulary) -> list[dict[str, Any]]:
    settings = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return [{**settings, **usage, "prompt": prompt} for prompt in vocabulary.prompts(NUM_PROMPTS)]


def check_text(door: GatewayUnderTest, vocabulary: EchoVocabulary) -> int:
    """Checks that one answer is the text of its tokens; returns the number of prompt tokens."""
    body = {**door.bodies[0], "return_token_ids": True}
    headers = {"Authorization": f"Bearer {door.key}"}
    answer = httpx.post(f"http://127.0.0.1:{door.port}{PATH}", json=body, headers=headers, timeout=60, trust_env=False)
    lines = answer.raise_for_status().text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids") or []]
    text = "".join(choice["text"] for choice in choices)
    if len(token_ids) != TOKENS or text != vocabulary.tokenizer.decode(token_ids):
        raise RuntimeError(f"the text is not that of the {len(token_ids)} tokens: {text!r}")
    return int(events[-1]["usage"]["prompt_tokens"])


def bare_sample(num_requests: int) -> Sample:
    """The same load on uvicorn with an application that only sends events."""
    with child("bare_server", str(TOKENS)) as process:
        port = int(read_json_line(process))
        door = GatewayUnderTest(process.pid, port, "none", [{"prompt": "x" * PROMPT_WORDS * 6}])
        door.load(CONCURRENCY, ends=0)
        return door.load(num_requests, ends=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests, under 50 s")
    repeats, num_requests = (2, 1024) if parser.parse_args().quick else (5, 4096)
    progress("making the vocabulary")
    vocabulary = EchoVocabulary.make()
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder, child("echo_server") as echo:
        home, addresses = Path(folder), read_json_line(echo)
        with running_gateway(home, addresses) as (pid, port):
            key = tenant_key(port)
            asyncio.run(publish(home, addresses["tokenizer_digest"]))
            door = GatewayUnderTest(pid, port, key, bodies_of(vocabulary))
            check_text(door, vocabulary)
            measure(door, echo, repeats, num_requests)


def sample(door: GatewayUnderTest, name: str, num_requests: int) -> Sample:
    taken = door.load(num_requests)
    progress(f"{name}: {taken.us_per_token:.1f} us per token, {taken.num_requests / taken.seconds:.0f} requests/s")
    return taken


def measure(door: GatewayUnderTest, echo: subprocess.Popen[str], repeats: int, num_requests: int) -> None:
    door.load(4 * CONCURRENCY)  # warm-up
    fast = [sample(door, "as fast as it goes", num_requests) for _ in range(repeats)]
    set_step(echo, STEP_S)
    paced = [sample(door, "paced", num_requests // 2) for _ in range(max(1, repeats // 2))]
    bare = bare_sample(num_requests)
    paced_us = statistics.median(one.us_per_token for one in paced)
    per_token = statistics.median(one.us_per_token for one in fast)
    per_request = statistics.median(one.cpu_s * 1e6 / one.num_requests for one in fast)
    rate = statistics.median(one.num_requests / one.seconds for one in fast)
    first_ms = statistics.median(one.first_byte_p50_ms for one in fast)
    peers = f"LiteLLM 640 us, Dynamo (Rust) 15 us, uvicorn alone {bare.us_per_token:.1f} us here"
    checks = [
        Check("cpu_us_per_token", per_token, "us", 40, peers),
        Check("cpu_us_per_token_paced", paced_us, "us", None, "20 ms steps"),
        Check("cpu_us_per_request", per_request, "us", None, "all of its tokens included"),
        Check("requests_per_s", rate, "1/s", None, "Dynamo 1,909 on two cores; here client and workers share them"),
        Check("first_byte_p50_ms", first_ms, "ms", None, "at saturation"),
        Check("uvicorn_us_per_event", bare.us_per_token, "us", None, "only sends the same number of events"),
    ]
    conditions = {
        "prompt_words": PROMPT_WORDS,
        "prompt_tokens": round(fast[0].num_prompt_tokens / fast[0].num_requests, 1),
        "output_tokens": TOKENS,
        "concurrency": CONCURRENCY,
        "vocabulary": VOCAB_SIZE,
        "requests": num_requests,
        "samples": repeats,
        "load_average": round(os.getloadavg()[0], 1),
    }
    finish("gateway", conditions, checks)


if __name__ == "__main__":
    main()

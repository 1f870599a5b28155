"""CPU time of the gateway process per streamed token, with echo workers behind its real gRPC streams.

    python bench/gateway.py [--quick]

The gateway runs as under `torchrelay up`, with Redis, NATS, SQLite and traces in a file. An echo process plays the
scheduler, the store and the workers; another process is the client. Every token is one of 128,000 ids, is decoded by
the gateway and becomes its own event. The load runs twice: as fast as possible, and with engine steps of 20 ms, between
which the gateway sleeps.
"""

from __future__ import annotations

import asyncio
import json
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
from bench.report import Check, finish, parser_of, progress
from bench.streaming.echo_model import PROMPT_WORDS, VOCAB_SIZE, EchoVocabulary
from tests.support.brokers import free_port, nats_server, redis_server, running
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog
from torchrelay.gateway.catalog.model_settings import ModelSettings
from torchrelay.gateway.core import ModelShape, Version
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 64
CONCURRENCY = 64
STEP_S = 0.02
PATH = "/v1/completions"
MODEL = "bench/echo"
ENDS = 2  # events without a token: finish and usage
ADMIN_KEY = f"tra-{'0' * 32}"
NUM_PROMPTS = 512
LOAD_S = 120.0  # time limit of a load


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of a load."""

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
        answer = json.loads(done.stdout)
        num_tokens = answer["events"] - ends * num_requests
        claimed = answer["output_tokens"] if ends == ENDS else num_tokens
        if answer["num_errors"] or not num_tokens == claimed == num_requests * TOKENS:
            raise RuntimeError(f"not every token was an event of its own: {answer}")
        return Sample(
            used, answer["seconds"], num_requests, num_tokens, answer["prompt_tokens"], answer["first_byte_p50_ms"]
        )


@contextmanager
def child(module: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a program of `streaming/`, which communicates over standard streams and ends with its input."""
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
    """Runs a gateway; yields its process id and its REST port."""
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
    """Publishes the model directly in the catalog, because there is no store to pack it."""
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
        await catalog.publish_in(connection, tenant.tenant_id, "echo", version, ModelSettings())
    await database.close()


def bodies_of(vocabulary: EchoVocabulary) -> list[dict[str, Any]]:
    settings = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return [{**settings, **usage, "prompt": prompt} for prompt in vocabulary.prompts(NUM_PROMPTS)]


def check_text(gateway: GatewayUnderTest, vocabulary: EchoVocabulary) -> None:
    """Checks that an answer is the text of its tokens. Raises ``RuntimeError`` otherwise."""
    body = {**gateway.bodies[0], "return_token_ids": True}
    headers = {"Authorization": f"Bearer {gateway.key}"}
    answer = httpx.post(
        f"http://127.0.0.1:{gateway.port}{PATH}", json=body, headers=headers, timeout=60, trust_env=False
    )
    lines = answer.raise_for_status().text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids") or []]
    text = "".join(choice["text"] for choice in choices)
    if len(token_ids) != TOKENS or text != vocabulary.tokenizer.decode(token_ids):
        raise RuntimeError(f"the text is not that of the {len(token_ids)} tokens: {text!r}")


def bare_sample(num_requests: int) -> Sample:
    """Figures of the same load on uvicorn, with an application that only sends events."""
    with child("bare_server", str(TOKENS)) as process:
        port = int(read_json_line(process))
        gateway = GatewayUnderTest(process.pid, port, "none", [{"prompt": "x" * PROMPT_WORDS * 6}])
        gateway.load(CONCURRENCY, ends=0)
        return gateway.load(num_requests, ends=0)


def main() -> None:
    parser = parser_of(__doc__, "fewer requests, under 50 s")
    repeats, num_requests = (2, 1024) if parser.parse_args().quick else (5, 4096)
    progress("making the vocabulary")
    vocabulary = EchoVocabulary.make()
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder, child("echo_server") as echo:
        home, addresses = Path(folder), read_json_line(echo)
        with running_gateway(home, addresses) as (pid, port):
            key = tenant_key(port)
            asyncio.run(publish(home, addresses["tokenizer_digest"]))
            gateway = GatewayUnderTest(pid, port, key, bodies_of(vocabulary))
            check_text(gateway, vocabulary)
            measure(gateway, echo, repeats, num_requests)


def sample(gateway: GatewayUnderTest, name: str, num_requests: int) -> Sample:
    taken = gateway.load(num_requests)
    progress(f"{name}: {taken.us_per_token:.1f} us per token, {taken.num_requests / taken.seconds:.0f} requests/s")
    return taken


def measure(gateway: GatewayUnderTest, echo: subprocess.Popen[str], repeats: int, num_requests: int) -> None:
    gateway.load(4 * CONCURRENCY)  # warm-up
    fast = [sample(gateway, "as fast as possible", num_requests) for _ in range(repeats)]
    set_step(echo, STEP_S)
    paced = [sample(gateway, "paced", num_requests // 2) for _ in range(max(1, repeats // 2))]
    bare = bare_sample(num_requests)
    paced_us = statistics.median(each.us_per_token for each in paced)
    per_token = statistics.median(each.us_per_token for each in fast)
    per_request = statistics.median(each.cpu_s * 1e6 / each.num_requests for each in fast)
    rate = statistics.median(each.num_requests / each.seconds for each in fast)
    first_ms = statistics.median(each.first_byte_p50_ms for each in fast)
    peers = f"LiteLLM 640 us, Dynamo (Rust) 15 us, uvicorn alone {bare.us_per_token:.1f} us here"
    checks = [
        Check("cpu_us_per_token", per_token, "us", 40, peers),
        Check("cpu_us_per_token_paced", paced_us, "us", None, "20 ms steps"),
        Check("cpu_us_per_request", per_request, "us", None, "including all of its tokens"),
        Check("requests_per_s", rate, "1/s", None, "Dynamo 1,909 on two cores, which client and workers share here"),
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
    }
    finish("gateway", conditions, checks)


if __name__ == "__main__":
    main()

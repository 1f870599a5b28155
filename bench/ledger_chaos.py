"""The books after kills: each process that keeps or counts money is killed (-9) at random moments under load.

    python bench/ledger_chaos.py [--quick] [--seed SEED]

`torchrelay up` runs with PostgreSQL. Two tenants, whose keys have limits of every kind, ask without a pause, half of
their requests as streams; beside them a batch runs. Gateway, a worker, NATS, Redis and the database are killed in a
random order, round by round, at random moments; `up` and the bench start them again at once. When everything has
ended, what the clients and the files of results have is compared with the ledger, and with the limits' reservations.
The last kill is the gateway's, because Redis forgets reservations with its own end. The seed is printed; it determines
the requests, the order and the pauses, not how far a request is when a process is killed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
import redis

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.batches import begin_batch
from bench.report import Check, finish, parser_of, progress
from tests.e2e.tenants import SMALL
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import Streamed, complete, headers
from tests.support.platform import Platform, running_platform
from tests.support.wait import wait_until
from tests.unit.gateway.postgres_server import PostgresServer, killable_postgres
from torchrelay.cli.api.client import GatewayClient
from torchrelay.common.identity.keys import broker_password
from torchrelay.common.net.nats_permissions import GATEWAY_USER

KINDS = ("database", "redis", "nats", "worker", "gateway")
WORKERS = ("prefill-0", "decode-0")
CLIENTS_PER_TENANT = 4
# Of each key: a killed gateway leaves the reservations of its requests at once, for as long as their leases are.
LIMITS = {
    "concurrent_requests": 3 * CLIENTS_PER_TENANT,
    "tokens_per_minute": 60_000,
    "requests_per_minute": 6_000,
    "budget_nano": 10**12,
}
BATCH_LIMITS = {"concurrent_requests": 64, "tokens_per_minute": 10**9, "budget_nano": 10**12}
PRICE = {"prompt_nano": 100, "cached_nano": 25, "output_nano": 400}
BATCH_PRICE = {"prompt_nano": 50, "cached_nano": 10, "output_nano": 200}
LINE_TOKENS = (100, 400)
TIMEOUT_S, END_S, RELEASE_S = 60.0, 240.0, 5.0


Outcome: TypeAlias = Literal["whole", "broken", "refused", "unsent"]  # unsent: no connection


@dataclass(frozen=True, slots=True)
class Form:
    num_lines: int
    num_rounds: int
    pause_s: tuple[float, float]  # before a kill
    lease_s: float  # of a reservation whose gateway is gone
    sweep_after_s: float


FULL, QUICK = Form(2400, 6, (1.0, 8.0), 60.0, 10.0), Form(150, 1, (0.5, 2.0), 5.0, 2.0)


@dataclass(frozen=True, slots=True)
class Key:
    """A key with limits, its id in the ledger, and its tenant's model."""

    secret: str
    key_id: str
    model: str

    @staticmethod
    def make(admin: GatewayClient, model: str, limits: Mapping[str, int]) -> Key:
        order = {"tenant": model.partition("/")[0], "name": "chaos", **limits}
        made = admin.call("POST", "/v1/keys", json=order)
        return Key(made["key"], made["id"], model)


@dataclass(frozen=True, slots=True)
class Received:
    """The part of an answer that a client received.

    ``request_id`` is empty if the connection broke before the head of the reply.
    """

    key_id: str
    request_id: str
    outcome: Outcome
    num_prompt_tokens: int
    num_tokens: int


class Load:
    """Clients of one key each, which ask until ``stop``."""

    def __init__(self, platform: Platform, keys: list[Key], seed: int) -> None:
        self._url = f"{platform.http}/v1/completions"
        self._stop, self._lock = threading.Event(), threading.Lock()
        self.received: list[Received] = []
        self.num_running = 0
        self._threads = [
            threading.Thread(target=self._run, args=(key, random.Random(f"{seed} {key_number} {number}")))
            for key_number, key in enumerate(keys)
            for number in range(CLIENTS_PER_TENANT)
        ]

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def _run(self, key: Key, numbers: random.Random) -> None:
        with httpx.Client(timeout=TIMEOUT_S, headers=headers(key.secret)) as client:
            while not self._stop.is_set():
                received = self._ask(client, key, numbers)
                with self._lock:
                    self.received.append(received)
                if received.outcome != "whole":
                    self._stop.wait(0.3)

    def _ask(self, client: httpx.Client, key: Key, numbers: random.Random) -> Received:
        prompt = [numbers.randrange(250) for _ in range(numbers.randint(8, 100))]
        most, is_stream = numbers.randint(10, 200), numbers.random() < 0.5
        body = {"model": key.model, "prompt": prompt, "max_tokens": most, "ignore_eos": True, "stream": is_stream}
        state, request_id = Streamed(), ""
        outcome: Outcome = "broken"
        with self._lock:
            self.num_running += 1
        try:
            with client.stream("POST", self._url, json={**body, "return_token_ids": True}) as response:
                request_id = response.headers["x-request-id"]
                if response.status_code != 200:
                    outcome = "refused"
                elif is_stream:
                    _read(response, state)
                    outcome = "whole" if state.done and state.error is None else "broken"
                else:
                    state.take(json.loads(response.read()))
                    outcome = "whole"
        except httpx.ConnectError:
            outcome = "unsent"
        except httpx.TransportError:
            pass  # it is broken
        with self._lock:
            self.num_running -= 1
        return Received(key.key_id, request_id, outcome, len(prompt), len(state.token_ids))


def _read(response: httpx.Response, state: Streamed) -> None:
    rest = b""
    for received in response.iter_bytes():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                state.done = True
            elif line.startswith(b"data: "):
                state.take(json.loads(line[6:]))


@dataclass(frozen=True, slots=True)
class Kill:
    at_unix_s: float
    kind: str
    num_running: int  # requests of the clients
    num_reserved: int  # of a gateway that was killed: reservations that it left


class Reservations:
    """The running requests that Redis knows: members of the sorted sets of all tenants."""

    def __init__(self, platform: Platform) -> None:
        password = broker_password(bytes.fromhex(platform.home.cluster_key()), "redis", GATEWAY_USER)
        self._url = platform.endpoints["redis"].replace("***", password)

    def number(self) -> int:
        with closing(redis.Redis.from_url(self._url)) as client:
            return sum(client.zcard(name) for name in client.scan_iter("relay:{*}:running"))


class Killer:
    """Kills processes of a platform, each as soon as its successor of the kill before serves."""

    def __init__(self, platform: Platform, database: PostgresServer, load: Load, numbers: random.Random) -> None:
        self._platform, self._database, self._load, self._numbers = platform, database, load, numbers
        self._reservations = Reservations(platform)
        self._old_pids: dict[str, int] = {}
        self.kills: list[Kill] = []

    def run(self, form: Form) -> None:
        for round_number in range(form.num_rounds):
            kinds = self._numbers.sample(KINDS, len(KINDS))
            if round_number == form.num_rounds - 1:
                kinds.sort(key=lambda kind: kind == "gateway")
            for kind in kinds:
                time.sleep(self._numbers.uniform(*form.pause_s))  # the load goes on for a random time
                self._kill(kind)
        self.await_all()

    def await_all(self) -> None:
        for name, pid in self._old_pids.items():
            self._platform.await_restart(name, pid)

    def _kill(self, kind: str) -> None:
        name = self._numbers.choice(WORKERS) if kind == "worker" else kind
        for awaited in (name, "redis") if kind == "gateway" else (name,):
            if awaited in self._old_pids:
                self._platform.await_restart(awaited, self._old_pids[awaited])
        num_running, at_unix_s = self._load.num_running, time.time()
        if kind == "database":
            self._database.kill()
            self._database.start()
        else:
            self._old_pids[name] = self._platform.kill(name)
        num_reserved = self._reservations.number() if kind == "gateway" else 0
        self.kills.append(Kill(at_unix_s, kind, num_running, num_reserved))
        progress(f"killed {name}: {num_running} requests under way, {num_reserved} reservations left")


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """A batch that has ended, and the lines of its files."""

    batch: dict[str, Any]
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]

    def custom_ids(self) -> Counter[str]:
        return Counter(line["custom_id"] for line in self.output + self.errors)

    def cost_nano(self) -> int:
        """The price of all usage in the answers."""
        cost = 0
        for line in self.output:
            usage = line["response"]["body"]["usage"]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            cost += (usage["prompt_tokens"] - cached) * BATCH_PRICE["prompt_nano"]
            cost += cached * BATCH_PRICE["cached_nano"] + usage["completion_tokens"] * BATCH_PRICE["output_nano"]
        return cost


def lines_of(model: str, num_lines: int, numbers: random.Random) -> list[dict[str, Any]]:
    """The bodies of a batch's lines."""
    return [
        {"prompt": [numbers.randrange(250) for _ in range(numbers.randint(8, 60))], "ignore_eos": True}
        | {"model": model, "max_tokens": numbers.randint(*LINE_TOKENS)}
        for _ in range(num_lines)
    ]


def ended_batch(client: GatewayClient, batch_id: str) -> BatchFiles:
    def has_ended() -> bool:
        return client.call("GET", f"/v1/batches/{batch_id}")["status"] in ("completed", "failed", "expired")

    wait_until(has_ended, "the end of the batch", END_S)
    batch = client.call("GET", f"/v1/batches/{batch_id}")

    def lines(file_id: str | None) -> list[dict[str, Any]]:
        content = client.content("GET", f"/v1/files/{file_id}/content") if file_id else b""
        return [json.loads(line) for line in content.splitlines()]

    return BatchFiles(batch, lines(batch["output_file_id"]), lines(batch["error_file_id"]))


def bills_of(admin: GatewayClient, key_id: str) -> dict[str, dict[str, Any]]:
    """All requests of a key in the ledger, by their ids."""
    bills: dict[str, dict[str, Any]] = {}
    page: dict[str, Any] = {}
    while not bills or page["has_more"]:
        last = {} if not bills else {"after_id": page["data"][-1]["id"], "after_status": page["data"][-1]["status"]}
        page = admin.call("GET", "/v1/requests", params={"key": key_id, "limit": 500, **last})
        bills |= {bill["id"]: bill for bill in page["data"]}
        if not page["data"]:
            break
    return bills


def num_billed_wrong(received: list[Received], bills: Mapping[str, Mapping[str, Any]]) -> int:
    """Tokens by which bills differ from what clients have.

    A whole answer costs its tokens, a refused request nothing, and a broken answer at least what arrived. Requests
    that no client can name are at most those whose connections broke before the heads of their replies.
    """
    num_wrong, unnamed = 0, dict(bills)
    for each in received:
        bill = unnamed.pop(each.request_id, None)
        billed: int = bill["completion_tokens"] if bill else 0
        if each.outcome == "whole":
            num_prompt = bill["prompt_tokens"] if bill else 0
            wrong = abs(billed - each.num_tokens) + abs(num_prompt - each.num_prompt_tokens)
        elif each.outcome == "refused":
            wrong = billed
        else:
            wrong = max(0, each.num_tokens - billed)
        if wrong:
            progress(f"billed wrong: {each}, {bill}")
        num_wrong += wrong
    num_broken = sum(each.outcome == "broken" and not each.request_id for each in received)
    most: list[int] = sorted((bill["completion_tokens"] for bill in unnamed.values()), reverse=True)
    if len(most) > num_broken:
        progress(f"{len(most)} requests in the ledger that clients cannot name, {num_broken} broken connections")
    return num_wrong + sum(most[num_broken:])


def orphans(platform: Platform, keys: list[Key], lease_end_s: float) -> int:
    """Reservations and running requests that are left after the leases; a request of each tenant clears late ones."""
    time.sleep(max(0.0, lease_end_s - time.monotonic()))
    for key in keys:
        complete(platform, key.secret, key.model, [1, 2, 3], max_tokens=1)
    reservations = Reservations(platform)

    def number() -> int:
        num_running = 0
        for key in keys:
            with GatewayClient(platform.http, key.secret) as client:
                num_running += client.call("GET", "/v1/keys/me")["requests_running"]
        return reservations.number() + num_running

    deadline = time.monotonic() + RELEASE_S
    while number() and time.monotonic() < deadline:
        time.sleep(0.1)  # the requests above release theirs after their answers
    return number()


def measure(platform: Platform, database: PostgresServer, folder: Path, form: Form, seed: int) -> list[Check]:
    checkpoint = make_checkpoint(folder / "model", "llama")
    models = [platform.upload(platform.tenant(tenant), checkpoint, "chaos") for tenant in ("acme", "birch")]
    with platform.admin() as admin:
        for price in (PRICE, {**BATCH_PRICE, "service": "batch"}):
            admin.call("PUT", "/v1/prices", json=price)
        keys = [Key.make(admin, model, LIMITS) for model in models]
        nightly = Key.make(admin, models[0], BATCH_LIMITS)
        for key in (*keys, nightly):
            complete(platform, key.secret, key.model, [1, 2, 3], max_tokens=1)
        before = {key.key_id: bills_of(admin, key.key_id) for key in (*keys, nightly)}
        numbers = random.Random(seed)
        load = Load(platform, keys, seed)
        killer = Killer(platform, database, load, numbers)
        with GatewayClient(platform.http, nightly.secret) as client:
            with load.asking():
                batch_id = begin_batch(client, lines_of(nightly.model, form.num_lines, numbers))
                killer.run(form)
            lease_end_s = time.monotonic() + form.lease_s + 1.0
            files = ended_batch(client, batch_id)

        def is_settled() -> bool:
            return not admin.call("GET", "/v1/requests", params={"status": "running"})["data"]

        wait_until(is_settled, "the end of all requests", END_S)
        progress(f"all has ended; {max(0.0, lease_end_s - time.monotonic()):.0f} s until the last lease ends")
        bills = {key.key_id: bills_of(admin, key.key_id) for key in (*keys, nightly)}
        for key_id, first in before.items():
            for request_id in first:
                del bills[key_id][request_id]
        num_orphans = orphans(platform, [*keys, nightly], lease_end_s)
        reconciled = admin.call("GET", "/v1/reconcile")
    for fault in reconciled["faults"]:
        progress(f"reconcile: {fault}")
    return checks_of(form, killer.kills, load.received, files, bills, nightly, reconciled, num_orphans)


def checks_of(
    form: Form,
    kills: list[Kill],
    received: list[Received],
    files: BatchFiles,
    bills: Mapping[str, Mapping[str, Mapping[str, Any]]],
    nightly: Key,
    reconciled: Mapping[str, Any],
    num_orphans: int,
) -> list[Check]:
    custom_ids, expected = files.custom_ids(), {f"line-{number}" for number in range(form.num_lines)}
    line_bills = bills[nightly.key_id].values()
    billed_nano, cost_nano = sum(bill["cost_nano"] for bill in line_bills), files.cost_nano()
    num_wrong = sum(
        num_billed_wrong([each for each in received if each.key_id == key_id], of_key)
        for key_id, of_key in bills.items()
        if key_id != nightly.key_id
    )
    ended_unix_s = files.batch["completed_at"] or 0
    under_load = [kill.kind for kill in kills if kill.num_running and kill.at_unix_s < ended_unix_s]
    some = f"{len(under_load)} of {len(kills)} kills"
    outcomes = Counter(each.outcome for each in received)
    num_lost_attempts = sum(bill["status"] == "gateway_lost" for bill in line_bills)
    num_left = sum(kill.num_reserved for kill in kills)
    rows = f"{reconciled['num_ledger_rows']} ledger rows"
    return [
        Check("ledger_difference", abs(reconciled["difference_nano"]), "nano-$", 0, rows),
        Check("ledger_faults", len(reconciled["faults"]), "", 0, rows),
        Check("lines_twice", sum(number - 1 for number in custom_ids.values()), "", 0, f"{form.num_lines} lines"),
        Check("lines_lost", len(expected ^ custom_ids.keys()), "", 0, f"{form.num_lines} lines"),
        Check("lines_failed", len(files.errors), "", 0, f"{form.num_lines} lines"),
        Check("batch_bill_difference", abs(billed_nano - cost_nano), "nano-$", 0, f"answers worth {cost_nano}"),
        Check("orphan_reservations", num_orphans, "", 0, f"killed gateways left {num_left}"),
        Check("tokens_billed_wrong", num_wrong, "", 0, f"{sum(each.num_tokens for each in received)} received"),
        Check("kinds_killed_under_load", len(set(under_load)), "", len(KINDS), some, at_least=True),
        Check("reservations_left", num_left, "", 1, "by killed gateways", at_least=True),
        Check("attempts_of_lines_lost", num_lost_attempts, "", 1, "with their gateways", at_least=True),
        Check("whole_answers", outcomes["whole"], "", 1, at_least=True),
        Check("broken_answers", outcomes["broken"], "", 1, at_least=True),
        Check("refused_requests", outcomes["refused"], "", None, f"{outcomes['unsent']} connections refused"),
    ]


def main() -> None:
    parser = parser_of(__doc__, "one round of kills, and leases of 5 s")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="default: random")
    arguments = parser.parse_args()
    form = QUICK if arguments.quick else FULL
    progress(f"seed {arguments.seed}")
    settings = {
        "TORCHRELAY_SWEEP_AFTER_S": str(form.sweep_after_s),
        "TORCHRELAY_RESERVATION_LEASE_S": str(form.lease_s),
    }
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name, killable_postgres() as database:
        settings["TORCHRELAY_DATABASE_URL"] = database.url
        with running_platform(Path(name) / "home", SMALL, settings) as platform:
            checks = measure(platform, database, Path(name), form, arguments.seed)
    conditions = {"seed": arguments.seed, "quick": arguments.quick, "lines": form.num_lines, "rounds": form.num_rounds}
    conditions |= {"clients": 2 * CLIENTS_PER_TENANT, "lease_s": form.lease_s, "fault": "kill -9"}
    finish("ledger_chaos", conditions, checks)


if __name__ == "__main__":
    main()

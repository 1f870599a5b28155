"""Processes that hang or die under load: the cost to streams and cold requests, and the time until replacement.

    python bench/hangs.py [--quick]

`torchrelay up` runs with a prefill worker, a decode worker and a free worker. Each process in turn is stopped (SIGSTOP,
for 30 s unless it is replaced sooner) and killed (kill -9) while 8 streams run; at the same time, 4 requests are sent
for a model at zero. The model is fp32, whose greedy tokens do not depend on the worker, so each stream is compared with
an undisturbed stream.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, progress
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import headers, stream
from tests.support.platform import Platform, running_platform
from torchrelay.control.v1 import types_pb2

NUM_STREAMS = 8
NUM_COLD = 4
NUM_COLD_TOKENS = 8
STOP_S = 30.0
TIMEOUT_S = 90.0
PROMPTS = [list(range(20 + i, 52 + i)) for i in range(NUM_STREAMS)]
BROKERS = ("redis", "nats")
WORKERS = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE}
PROCESSES = (*BROKERS, "param-store", "scheduler", *WORKERS)
QUICK = (("stop", "decode"), ("stop", "scheduler"), ("kill", "decode"))


@dataclass(slots=True)
class StreamOutcome:
    """Tokens of a stream; ``max_gap_s`` is the longest time without a token after the first token."""

    token_ids: list[int] = field(default_factory=list)
    max_gap_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ColdOutcome:
    """An answer, or a refusal with its cause."""

    took_s: float
    token_ids: list[int]
    status: int
    cause: str


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    fault: str  # stop, kill
    process: str
    replaced_s: float
    streams: list[StreamOutcome]
    cold: list[ColdOutcome]

    @property
    def resume_s(self) -> float:
        return max(stream.max_gap_s for stream in self.streams)

    @property
    def cold_answer_s(self) -> float:
        return max(answer.took_s for answer in self.cold)

    @property
    def num_received(self) -> int:
        received = [each.token_ids for each in self.streams] + [each.token_ids for each in self.cold]
        return sum(map(len, received))

    def __str__(self) -> str:
        refused = [f"{answer.status} {answer.cause}" for answer in self.cold if not answer.token_ids]
        return (
            f"{self.fault} {self.process}: replaced in {self.replaced_s:.1f} s, longest gap {self.resume_s:.1f} s, "
            f"cold answers in {self.cold_answer_s:.1f} s{', refused: ' if refused else ''}{'; '.join(refused)}"
        )


class Load:
    """Requests of a tenant."""

    def __init__(self, platform: Platform, key: str, model: str, num_tokens: int) -> None:
        self._platform, self._key, self._model, self._num_tokens = platform, key, model, num_tokens

    def stream(self, prompt: list[int], on_token: Callable[[], None] = lambda: None) -> StreamOutcome:
        outcome, last_s = StreamOutcome(), 0.0
        options = {"max_tokens": self._num_tokens, "ignore_eos": True, "timeout_s": TIMEOUT_S}
        try:
            for state in stream(self._platform, self._key, self._model, prompt, **options):
                now_s = time.monotonic()
                if len(state.token_ids) > len(outcome.token_ids):
                    outcome.max_gap_s = max(outcome.max_gap_s, now_s - last_s) if outcome.token_ids else 0.0
                    outcome.token_ids, last_s = [*state.token_ids], now_s
                    on_token()
                if state.error is not None:
                    outcome.error = str(state.error)
        except (httpx.TransportError, AssertionError) as error:
            outcome.error = repr(error)[:300]
        if not outcome.error and len(outcome.token_ids) != self._num_tokens:
            outcome.error = f"{len(outcome.token_ids)} of {self._num_tokens} tokens"
        return outcome

    def cold(self, model: str) -> ColdOutcome:
        body = {"model": model, "prompt": PROMPTS[0], "max_tokens": NUM_COLD_TOKENS, "temperature": 0}
        options = {"ignore_eos": True, "return_token_ids": True}
        begin_s = time.monotonic()
        url = f"{self._platform.http}/v1/completions"
        try:
            reply = httpx.post(url, json={**body, **options}, headers=headers(self._key), timeout=TIMEOUT_S)
        except httpx.TransportError as error:
            return ColdOutcome(float("inf"), [], 0, repr(error))
        took_s, answer = time.monotonic() - begin_s, reply.json()
        if reply.status_code == 200:
            return ColdOutcome(took_s, answer["choices"][0]["token_ids"], 200, "")
        return ColdOutcome(took_s, [], reply.status_code, answer["error"]["message"])

    def undisturbed(self) -> list[StreamOutcome]:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            return list(pool.map(self.stream, PROMPTS))

    def case(self, fault: str, process: str, cold_model: str) -> CaseOutcome:
        """Causes a fault under load; waits until the process is replaced and all requests have ended."""
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(NUM_STREAMS + NUM_COLD + 1) as pool:
            streams = [pool.submit(self.stream, prompt, begun.release) for prompt in PROMPTS]
            for _ in range(NUM_STREAMS * 8):  # several tokens per stream, on average
                if not begun.acquire(timeout=TIMEOUT_S):
                    raise RuntimeError("the streams did not start")
            name = self._child(process)
            replaced = pool.submit(replacement_s, self._platform, name, fault)
            cold = [pool.submit(self.cold, cold_model) for _ in range(NUM_COLD)]
            return CaseOutcome(fault, process, replaced.result(), results(streams), results(cold))

    def _child(self, process: str) -> str:
        """Name of the child of `up`; for a role, the worker that plays it now for the model."""
        if process not in WORKERS:
            return process
        view = next(self._platform.views())
        hosts = [each for each in view.instances if each.model == self._model and WORKERS[process] in each.roles]
        return max(hosts, key=lambda each: each.num_running).worker_id

    def await_recovery(self) -> None:
        """Waits until all services answer and all workers are present."""
        deadline = time.monotonic() + TIMEOUT_S
        for view in self._platform.views():
            health = httpx.get(f"{self._platform.http}/health", timeout=TIMEOUT_S).json()
            if health["status"] == "ok" and len(view.workers) == len(WORKERS) + 1:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the platform did not recover: {health}")
            time.sleep(0.1)

    def num_billed(self) -> int:
        usage = httpx.get(f"{self._platform.http}/v1/usage", headers=headers(self._key), timeout=TIMEOUT_S).json()
        num_tokens: int = usage["total"]["completion_tokens"]
        return num_tokens


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]


def replacement_s(platform: Platform, child: str, fault: str) -> float:
    """Stops or kills a child; returns seconds until another process serves, or infinity after ``TIMEOUT_S``."""
    begin_s, pid = time.monotonic(), platform.pid(child)
    with stopped(pid) if fault == "stop" else killed(pid):
        while time.monotonic() < begin_s + TIMEOUT_S:
            if platform.serves(child, other_than=pid):
                return time.monotonic() - begin_s
            time.sleep(0.02)
    return float("inf")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process, which continues after ``STOP_S`` if it still exists."""

    def resume() -> None:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(STOP_S, resume)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def killed(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGKILL)
    yield


def main() -> None:
    parser = parser_of(__doc__, "two processes and shorter streams, under 50 s")
    quick = parser.parse_args().quick
    cases = QUICK if quick else tuple((fault, process) for fault in ("stop", "kill") for process in PROCESSES)
    num_tokens = 400 if quick else 1000
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        root = Path(folder)
        progress("making the checkpoints")
        warm = make_checkpoint(root / "warm", "llama", **LLAMA_33MB)
        cold = [make_checkpoint(root / f"cold-{i}", "llama", seed=i) for i in range(len(cases))]
        options = ("--both-workers", "1", "--arena-mb", "512", "--threads", "1", "--idle-timeout-s", "600")
        with running_platform(root / "home", options, {"TORCHRELAY_CPU_REORDER": "false"}) as platform:
            key = platform.tenant("bench")
            names = [platform.upload(key, path, path.name) for path in cold]
            load = Load(platform, key, platform.upload(key, warm, "warm"), num_tokens)
            measure(load, cases, names, num_tokens)


def measure(load: Load, cases: Sequence[tuple[str, str]], cold_models: Sequence[str], num_tokens: int) -> None:
    load.await_recovery()
    expected = load.undisturbed()
    if errors := [each.error for each in expected if each.error]:
        raise RuntimeError(f"the undisturbed streams failed: {errors}")
    num_received, outcomes = sum(len(each.token_ids) for each in expected), []
    for (fault, process), cold_model in zip(cases, cold_models, strict=True):
        outcomes.append(load.case(fault, process, cold_model))
        progress(str(outcomes[-1]))
        load.await_recovery()
        num_received += outcomes[-1].num_received
    report(load, outcomes, expected, num_received, num_tokens)


def report(
    load: Load, outcomes: list[CaseOutcome], expected: list[StreamOutcome], num_received: int, num_tokens: int
) -> None:
    lost = [each for outcome in outcomes for each in outcome.streams if each.error]
    apart = sum(
        stream.token_ids != undisturbed.token_ids[: len(stream.token_ids)]
        for outcome in outcomes
        for stream, undisturbed in zip(outcome.streams, expected, strict=True)
    )
    for each in lost:
        progress(f"lost: {each.error}")
    deadline = time.monotonic() + 10
    while (difference := load.num_billed() - num_received) and time.monotonic() < deadline:
        time.sleep(0.1)
    hung = [outcome.resume_s for outcome in outcomes if outcome.process in WORKERS and outcome.fault == "stop"]
    others = [outcome.resume_s for outcome in outcomes if outcome.process not in WORKERS]
    died = [outcome.resume_s for outcome in outcomes if outcome.process in WORKERS and outcome.fault == "kill"]
    refused = [answer for outcome in outcomes for answer in outcome.cold if not answer.token_ids]
    unexplained = [answer for answer in refused if answer.status not in (429, 503) or not answer.cause]
    cold_s = max(outcome.cold_answer_s for outcome in outcomes)
    checks = [
        Check("streams_lost", len(lost), "streams", 0, f"of {sum(len(outcome.streams) for outcome in outcomes)}"),
        Check("streams_apart", apart, "streams", 0, "compared with undisturbed streams"),
        Check("resume_s", max(hung), "s", 5, "longest gap after a worker hangs"),
        Check("resume_killed_s", max(died), "s", None, "longest gap after a worker is killed"),
        Check(
            "resume_others_s",
            max(others, default=0.0),
            "s",
            None,
            "after another process hangs or is killed",
        ),
        Check("cold_answer_s", cold_s, "s", 15, "answered, or refused with the cause"),
        Check("cold_refused", len(refused), "requests", None, f"of {len(outcomes) * NUM_COLD}"),
        Check("cold_without_cause", len(unexplained), "requests", 0),
        Check("replaced_s", max(outcome.replaced_s for outcome in outcomes), "s", 10, "until another process serves"),
        Check("ledger_difference", abs(difference), "tokens", 0, f"billed against {num_received} received"),
    ]
    conditions = {
        "streams": NUM_STREAMS,
        "cold_requests": NUM_COLD,
        "output_tokens": num_tokens,
        "cases": [f"{outcome.fault} {outcome.process}" for outcome in outcomes],
    }
    finish("hangs", conditions, checks)


if __name__ == "__main__":
    main()

"""The scheduler's predictions for requests, and its `Retry-After` for refused requests, against measurements.

    python bench/prediction.py [--quick] [--padded] [--record PATH]

`torchrelay up` runs with a prefill and a decode worker, and its scheduler records its inputs. Requests of many lengths
arrive at random times, at 30, 60 and 80% of the rate at which a burst gets first tokens; then at 250% of that rate,
from clients that return when `Retry-After` says so. A prediction is the scheduler's at the placement; the measurement
is the gateway's, from the placement on.

Workers compute with one thread each. On two cores, workers, services and clients interrupt each other at random, which
cannot be predicted. Two further figures show the size of that noise: the deviation of equal requests, sent one by one,
from their own median (`ttft_alone`, `tbt_alone`), and the error of an oracle that knows all future batches
(`tbt_oracle_30`). With --padded, layers take fixed times (`calibration/padded_worker.py`), which leaves the errors of
the queue and of the batch.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.calibration.padding import padded_workers
from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, progress
from bench.scheduling.record import MeasuredAttempt, Record, read_record, step_of_known_batches_s
from bench.scheduling.refusals import Refusal, refusals_of
from bench.streaming.open_load import open_job
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.platform import Platform, running_platform
from torchrelay.cli.bench.bodies import completion_body
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.sim.summary import percentile

ROOT = Path(__file__).resolve().parents[1]
PADDED: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 8, "max_position_embeddings": 2048}
LATENCY = LatencyModel(StepCost(0.02, 4e-4, 1e-7, 1000), StepCost(0.02, 5e-4, 1e-6, 1000), token_budget=512)
LOADS = (0.3, 0.6, 0.8)
OVERLOAD = 2.5
QUEUE_LIMIT = 16
MIN_S = 0.02  # shorter requests do not count
PROMPT_TOKENS, OUTPUT_TOKENS = (64, 512), (16, 96)
SHARED_TOKENS, NUM_SHARED = 128, 4  # prefixes that several prompts share
TIMEOUT_S = 300.0
NUM_WARM, NUM_BURST = 8, 16
ALONE_EVERY_S, ALONE_TOKENS = 0.6, (192, 48)  # equal requests: interval, and tokens of prompt and answer


@dataclass(frozen=True, slots=True)
class Form:
    """Seconds of each load and of the overload, and the number of requests sent one by one."""

    load_s: float
    overload_s: float
    num_alone: int


FULL, QUICK = Form(60.0, 60.0, 24), Form(4.5, 4.0, 6)


class Client:
    """A tenant's requests of random lengths for a model."""

    def __init__(self, platform: Platform, key: str, model: str) -> None:
        self._url, self._key, self._model = platform.http, key, model
        self._random = random.Random(0)
        self._beginnings = [self._tokens(SHARED_TOKENS) for _ in range(NUM_SHARED)]

    def send(
        self, times: Sequence[float], comes_back: bool = False, lengths: tuple[int, int] | None = None
    ) -> list[list[dict[str, Any]]]:
        """Sends a request at each time; returns the tries of each. ``lengths`` of prompt and answer are random by
        default; prompts of given lengths share no prefix. Raises ``RuntimeError`` unless all requests got their tokens.
        """
        bodies = [
            completion_body(self._model, self._tokens(lengths[0]), lengths[1]) if lengths else self._random_body()
            for _ in times
        ]
        requests: list[dict[str, Any]] = [{"at": at, "body": body} for at, body in zip(times, bodies, strict=True)]
        job = open_job(self._url, self._key, requests, comes_back=comes_back)
        done = subprocess.run(
            [sys.executable, "-m", "bench.streaming.open_load"],
            input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        answers: list[list[dict[str, Any]]] = json.loads(done.stdout)
        for request, tries in zip(requests, answers, strict=True):
            last, expected = tries[-1], request["body"]["max_tokens"]
            is_displaced = comes_back and last["has_failed"]  # from a full queue, after the stream began
            if last["status"] == 200 and last["num_events"] < expected and not is_displaced:
                raise RuntimeError(f"{last['num_events']} of {expected} tokens arrived: {last}")
        return answers

    def at_random(self, per_s: float, seconds: float) -> list[float]:
        """Times of a Poisson process."""
        times, at = list[float](), 0.0
        while (at := at + self._random.expovariate(per_s)) < seconds:
            times.append(at)
        return times

    def _random_body(self) -> dict[str, Any]:
        low, high = PROMPT_TOKENS
        num_tokens = round(low * (high / low) ** self._random.random())
        beginning = self._random.choice(self._beginnings) if self._random.random() < 0.25 else []
        prompt = (beginning + self._tokens(num_tokens))[:num_tokens]
        return completion_body(self._model, prompt, self._random.randint(*OUTPUT_TOKENS))

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(VOCAB_SIZE - 64) for _ in range(number)]


@dataclass(frozen=True, slots=True)
class Measured:
    """Ids of the requests that were sent one by one and of each load, and the tries under overload."""

    per_s: float
    alone: set[str]
    by_load: dict[float, set[str]]
    overloaded: list[list[dict[str, Any]]]


def measure(client: Client, form: Form) -> Measured:
    client.send([0.0])  # loads the model
    client.send([0.1 * number for number in range(NUM_WARM)])
    alone = client.send([ALONE_EVERY_S * number for number in range(form.num_alone)], lengths=ALONE_TOKENS)
    burst = client.send([0.0] * NUM_BURST)
    took_s = max(tries[-1]["first_at"] for tries in burst) - min(tries[0]["sent_at"] for tries in burst)
    per_s, by_load = NUM_BURST / took_s, {}
    for load in LOADS:
        progress(f"{load:.0%} of {per_s:.1f} requests/s")
        answers = client.send(client.at_random(load * per_s, form.load_s))
        by_load[load] = {tries[0]["request_id"] for tries in answers}
    progress(f"{OVERLOAD:.0%} of {per_s:.1f} requests/s")
    sent = client.send(client.at_random(OVERLOAD * per_s, form.overload_s), comes_back=True)
    overloaded = [tries for tries in sent if not tries[-1]["has_failed"]]
    progress(f"{len(sent) - len(overloaded)} of {len(sent)} requests were displaced from the full queue")
    return Measured(per_s, {tries[0]["request_id"] for tries in alone}, by_load, overloaded)


Figure = Callable[[MeasuredAttempt], tuple[float, float | None]]  # predicted and measured


def ttft(attempt: MeasuredAttempt) -> tuple[float, float | None]:
    return attempt.predicted.ttft_s, attempt.outcome.ttft_s


def tbt(attempt: MeasuredAttempt) -> tuple[float, float | None]:
    return attempt.predicted.tbt_s, attempt.outcome.tbt_s


def errors(attempts: Sequence[MeasuredAttempt], figure: Figure) -> list[float]:
    """|measured - predicted| / measured of each warm attempt of at least ``MIN_S``."""
    relative = []
    for attempt in attempts:
        predicted_s, measured_s = figure(attempt)
        if measured_s and counts(attempt):
            relative.append(abs(measured_s - predicted_s) / measured_s)
    return relative


def median_errors(attempts: Sequence[MeasuredAttempt], figure: Figure) -> list[float]:
    """Errors of a predictor that always predicts the median of the earlier measurements."""
    relative = []
    for attempt in attempts:
        measured_s, counted = figure(attempt)[1], [each for each in attempts if counts(each)]
        before = [figure(each)[1] or 0.0 for each in counted if each.ended_at < attempt.placed_at]
        if measured_s and before and counts(attempt):
            relative.append(abs(measured_s - median(before)) / measured_s)
    return relative


def own_deviation(attempts: Sequence[MeasuredAttempt], figure: Figure) -> float:
    """Median of |measured - median of all| / measured of equal requests, the least error of any prediction."""
    measured = [value for attempt in attempts if (value := figure(attempt)[1])]
    usual = median(measured)
    return median(abs(each - usual) / each for each in measured)


def oracle_error(attempts: Sequence[MeasuredAttempt], every: Sequence[MeasuredAttempt]) -> float:
    """Median error of the times between tokens for an oracle that knows the batches of ``every`` attempt beforehand,
    and the factor on the steps of the worker's model that fits these attempts best.
    """
    counted = [attempt for attempt in attempts if counts(attempt) and attempt.outcome.tbt_s]
    known = [(step_of_known_batches_s(attempt, every), attempt.outcome.tbt_s or 0.0) for attempt in counted]
    factor = median(measured_s / step_s for step_s, measured_s in known)
    return median(abs(measured_s - factor * step_s) / measured_s for step_s, measured_s in known)


def counts(attempt: MeasuredAttempt) -> bool:
    return not attempt.is_cold and attempt.outcome.ended_at - attempt.placed_at >= MIN_S and has_ttft(attempt)


def has_ttft(attempt: MeasuredAttempt) -> bool:
    return (attempt.outcome.ttft_s or 0.0) >= MIN_S


def checks_of(record: Record, measured: Measured) -> list[Check]:
    checks = []
    by_load = {
        load: [attempt for attempt in record.attempts if attempt.request_id in ids]
        for load, ids in measured.by_load.items()
    }
    for name, figure, bound in (("ttft", ttft, 0.15), ("tbt", tbt, 0.10)):
        every = [attempt for attempts in by_load.values() for attempt in attempts]
        against = f"predicting the running median: {median(median_errors(every, figure)):.3f}"
        errors_by_load = {load: errors(attempts, figure) for load, attempts in by_load.items()}
        worst = max(median(each) for each in errors_by_load.values())
        checks.append(Check(f"{name}_error", worst, "ratio", bound, f"worst of three loads; {against}"))
        for load, each in errors_by_load.items():
            signed = [
                (figure(a)[1] or 0.0) / max(figure(a)[0], 1e-6) for a in by_load[load] if counts(a) and figure(a)[1]
            ]
            note = (
                f"{len(each)} requests, P90 {percentile(each, 90):.2f}; measured over predicted: {median(signed):.2f}"
            )
            checks.append(Check(f"{name}_error_{load * 100:.0f}", median(each), "ratio", None, note))
        alike = [attempt for attempt in record.attempts if attempt.request_id in measured.alone]
        note = f"{len(alike)} equal requests sent one by one, against their own median"
        checks.append(Check(f"{name}_alone", own_deviation(alike, figure), "ratio", None, note))
    for load, attempts in by_load.items():
        note = "error of an oracle that knows all future batches and the best factor"
        checks.append(
            Check(f"tbt_oracle_{load * 100:.0f}", oracle_error(attempts, record.attempts), "ratio", None, note)
        )
    for role, error in record.step_errors.items():
        note = "mean error of the worker's own model for its last steps"
        checks.append(Check(f"{role}_step_error", error, "ratio", None, note))
    return [*checks, *retry_checks(refusals_of(measured.overloaded, record.num_free))]


def retry_checks(refusals: Sequence[Refusal]) -> list[Check]:
    if not refusals:
        return [Check("retry_after_factor", float("nan"), "ratio", 2, "no request was refused")]
    told = median(refusal.factor(refusal.told_s) for refusal in refusals)
    always = median(refusal.actual_s for refusal in refusals)
    blind = median(refusal.factor(max(always, 1.0)) for refusal in refusals)
    against = f"{len(refusals)} refusals; the median of all, known afterwards: {blind:.2f}"
    return [Check("retry_after_factor", told, "ratio", 2, against)]


def main() -> None:
    parser = parser_of(__doc__, "shorter loads, under 50 s")
    parser.add_argument("--record", type=Path, help="keep the scheduler's inputs in this file")
    parser.add_argument("--padded", action="store_true", help="layers take fixed times")
    arguments = parser.parse_args()
    form = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        root = Path(folder)
        path = arguments.record or root / "record.json"
        checkpoint = make_checkpoint(root / "model", "llama", **(PADDED if arguments.padded else LLAMA_33MB))
        options = ("--arena-mb", "256", "--threads", "1", "--idle-timeout-s", "600", "--quiet")
        env = {"TORCHRELAY_RECORD": str(path), "TORCHRELAY_QUEUE_LIMIT": str(QUEUE_LIMIT)}
        if arguments.padded:
            env |= padded_workers(root, LATENCY)
        with running_platform(root / "home", options, env) as platform:
            key = platform.tenant("bench")
            measured = measure(Client(platform, key, platform.upload(key, checkpoint, "model")), form)
        checks = checks_of(read_record(path), measured)
    conditions = {
        "padded": arguments.padded,
        "requests_per_s": round(measured.per_s, 2),
        "load_s": form.load_s,
        "overload_s": form.overload_s,
    }
    finish("prediction", conditions, checks)


if __name__ == "__main__":
    main()

"""The simulator against the platform: times to first token of the same arrivals on the same hosts.

    python bench/calibrate.py [--quick]

Three hosts in network namespaces have a param-store and a worker with one slot each; another host has the control
services. Every layer takes a fixed time (`calibration/padded_worker.py`), so two cores suffice. For each seed, requests
of random lengths arrive at random times and at a rising rate for a model that is not loaded, so it is woken and scaled
up. Then the simulator runs the same arrivals on the same fleet. The duration of a load is measured before.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.calibration.padding import PADDED_WORKER, padding
from bench.report import Check, finish, progress
from bench.streaming.open_load import open_job
from tests.lab import Lab
from tests.lab.child import Child
from tests.lab.cluster import HOSTS, TARGETS, Cluster
from tests.lab.host import Host
from tests.lab.operations import Operator, Published
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from torchrelay.cli.bench.bodies import completion_body
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome, ServedModel
from torchrelay.sim.summary import percentile

ROOT = Path(__file__).resolve().parents[1]
RATE_MBIT = 400
SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 8, "max_position_embeddings": 1024}
KV_BYTES_PER_TOKEN = 2 * 8 * 2 * 16 * 4
LATENCY = LatencyModel(StepCost(0.02, 4e-4, 0.0, 1000), StepCost(0.02, 1e-3, 0.0, 1000), 512)
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 384), (8, 48)
PER_S = (1.0, 8.0)  # from the first second of a seed to its last
SEED_S = 12.0
TTFT_S = 2.0  # the objective of all requests
IDLE_TIMEOUT_S = 3.0
TIMEOUT_S = 300.0


class PaddedCluster(Cluster):
    """A cluster whose workers take the time that ``LATENCY`` predicts."""

    def _worker(self, host: Host, number: int = 0) -> Child:
        child = super()._worker(host, number)
        child.command = ["python", str(PADDED_WORKER)]
        child.env = {
            **child.env,
            "BENCH_LATENCY": padding(LATENCY),
            "TORCHRELAY_TOKEN_BUDGET": str(LATENCY.token_budget),
        }
        return child


@dataclass(frozen=True, slots=True)
class Lengths:
    num_prompt_tokens: int
    num_output_tokens: int


Arrivals = Sequence[tuple[float, Lengths]]


def arrivals(seed: int, seconds: float) -> Arrivals:
    """Arrivals at random times and a rising rate."""
    rng, at, times = random.Random(seed), 0.0, []
    low, high = PROMPT_TOKENS
    while (at := at + rng.expovariate(PER_S[0] + (PER_S[1] - PER_S[0]) * at / seconds)) < seconds:
        times.append((at, Lengths(round(low * (high / low) ** rng.random()), rng.randint(*OUTPUT_TOKENS))))
    return times


# The platform


@dataclass(slots=True)
class Real:
    """The platform, with the model in each host's memory and in no slot."""

    lab: Lab
    cluster: Cluster
    operator: Operator
    model: Published
    folder: Path

    def ttfts_s(self, arrivals: Arrivals, seed: int) -> list[float]:
        """Times to first token of the arrivals. Raises ``RuntimeError`` unless all answers are complete."""
        rng = random.Random(seed)
        self.operator.await_zero()
        requests: list[dict[str, Any]] = [{"at": at, "body": self._body(lengths, rng)} for at, lengths in arrivals]
        answers = self._send(requests)
        for request, answer in zip(requests, answers, strict=True):
            if answer["status"] != 200 or answer["num_events"] < request["body"]["max_tokens"]:
                raise RuntimeError(f"incomplete answer: {answer}")
        return [answer["first_at"] - answer["sent_at"] for answer in answers]

    def _body(self, lengths: Lengths, rng: random.Random) -> dict[str, Any]:
        prompt = [rng.randrange(VOCAB_SIZE - 64) for _ in range(lengths.num_prompt_tokens)]
        return completion_body(self.model.name, prompt, lengths.num_output_tokens)

    def _send(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sends the requests from the control host."""
        job = open_job(self.cluster.http, self.operator.key, requests)
        (self.folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "bench.streaming.open_load"]
        with (self.folder / "job.json").open("rb") as given, (self.folder / "answers.json").open("wb") as answers:
            process = self.lab["control"].spawn(command, stdin=given, stdout=answers, cwd=ROOT)
            if process.wait(TIMEOUT_S):
                raise subprocess.CalledProcessError(process.returncode, command)
        tries: list[list[dict[str, Any]]] = json.loads((self.folder / "answers.json").read_text())
        return [first for first, *_ in tries]


# The simulator


def simulated(arrivals: Arrivals, pack_bytes: int, load_s: float) -> list[RequestOutcome]:
    """Simulates the arrivals. ``load_s``: duration of a load from host memory into a slot."""
    model = ServedModel(
        name="t/model",
        num_devices=1,
        pack_bytes=pack_bytes,
        num_layers=SHAPE["num_hidden_layers"],
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        latency=LATENCY,
        ttft_base_s=TTFT_S,
        prefill_tokens_per_s=1e9,
        tpot_target_s=PolicyConfig().tbt_target_s,
    )
    rate = RATE_MBIT * 1e6 / 8
    fleet = Fleet(len(TARGETS), (1,), rate, pack_bytes / load_s, rate, 96 << 20)
    numbers = count()
    config = PolicyConfig(replicate=False, idle_timeout_s=IDLE_TIMEOUT_S)
    policy = Policy(config, lambda: f"inst-{next(numbers)}", START_S)
    plant = Plant(policy, fleet, [model], held={number: [model.name] for number in range(len(TARGETS))})
    requests = [
        Request(f"r{number}", at, model.name, lengths.num_prompt_tokens, lengths.num_output_tokens)
        for number, (at, lengths) in enumerate(arrivals)
    ]
    return plant.run(requests)


def checks_of(measured: Sequence[float], predicted: Sequence[float]) -> list[Check]:
    checks = []
    for percent, bound in ((50, 0.2), (95, 0.3)):
        real_s, sim_s = percentile(measured, percent), percentile(predicted, percent)
        against = f"simulated {sim_s * 1e3:.0f} ms, measured {real_s * 1e3:.0f} ms; {len(measured)} requests"
        checks.append(Check(f"p{percent}_error", abs(sim_s / real_s - 1), "ratio", bound, against))
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, under 50 s")
    parser.add_argument("--record", type=Path, help="keep the scheduler's inputs in this file")
    arguments = parser.parse_args()
    quick = arguments.quick
    seeds = range(1) if quick else range(5)
    measured, predicted = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        checkpoint = make_checkpoint(folder / "model", "llama", **SHAPE)
        record = {"RECORD": str(arguments.record)} if arguments.record else {}
        with (
            Lab(HOSTS, rate_mbit=RATE_MBIT) as lab,
            PaddedCluster(lab, folder, IDLE_TIMEOUT_S=str(IDLE_TIMEOUT_S), **record) as cluster,
        ):
            operator = Operator(cluster)
            real = Real(lab, cluster, operator, operator.publish(checkpoint), folder)
            operator.keep_copies_on(("source", *TARGETS), real.model.pack_id)
            loads = [real.ttfts_s([(0.0, Lengths(32, 8))], -seed)[0] for seed in range(3)]
            load_s = median(loads[1:]) - LATENCY.prefill_s(32)  # the first load reads more
            progress(f"a load takes {load_s * 1e3:.0f} ms")
            for seed in seeds:
                requests = arrivals(seed, SEED_S)
                of_real = real.ttfts_s(requests, seed)
                of_sim = [outcome.ttft_s for outcome in simulated(requests, real.model.pack_bytes, load_s)]
                progress(
                    f"seed {seed}: {len(requests)} requests, P50 and P95 measured "
                    + ", simulated ".join(
                        f"{percentile(s, 50):.3f} {percentile(s, 95):.3f} s" for s in (of_real, of_sim)
                    )
                )
                measured += of_real
                predicted += of_sim
    conditions = {"seeds": len(seeds), "seconds": SEED_S, "load_ms": round(load_s * 1e3)}
    finish("calibrate", conditions, checks_of(measured, predicted))


if __name__ == "__main__":
    main()

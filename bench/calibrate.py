"""The simulator against the platform: the same arrivals, the same hosts, and the times to the first token of both.

    python bench/calibrate.py [--quick]

Three hosts in network namespaces, each with a param-store and a worker of one slot, and the control services on a host
of their own. Every layer takes a fixed time (`calibration/padded_worker.py`), so that two cores suffice. For each seed,
requests of random lengths come at random times, more and more of them, for a model that nobody has loaded: it is woken,
and grows. Then the simulator plays the same arrivals on the same fleet. The time that a load takes is measured before.
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
from tests.lab import Lab
from tests.lab.child import Child
from tests.lab.cluster import HOSTS, TARGETS, Cluster
from tests.lab.host import Host
from tests.lab.operations import Operator, Published
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
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
    """Its workers take the time that ``LATENCY`` says."""

    def _worker(self, host: Host) -> Child:
        child = super()._worker(host)
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
    """Ever more of them, at random times."""
    rng, at, found = random.Random(seed), 0.0, []
    low, high = PROMPT_TOKENS
    while (at := at + rng.expovariate(PER_S[0] + (PER_S[1] - PER_S[0]) * at / seconds)) < seconds:
        found.append((at, Lengths(round(low * (high / low) ** rng.random()), rng.randint(*OUTPUT_TOKENS))))
    return found


# The platform


@dataclass(slots=True)
class Real:
    """The model is in each host's memory, and in nobody's slot."""

    lab: Lab
    cluster: Cluster
    operator: Operator
    model: Published
    folder: Path

    def ttfts_s(self, found: Arrivals, seed: int) -> list[float]:
        """Raises ``RuntimeError`` unless all were answered whole."""
        rng = random.Random(seed)
        self.operator.await_zero()
        requests: list[dict[str, Any]] = [{"at": at, "body": self._body(lengths, rng)} for at, lengths in found]
        answers = self._send(requests)
        for request, answer in zip(requests, answers, strict=True):
            if answer["status"] != 200 or answer["num_events"] < request["body"]["max_tokens"]:
                raise RuntimeError(f"not answered: {answer}")
        return [answer["first_at"] - answer["sent_at"] for answer in answers]

    def _body(self, lengths: Lengths, rng: random.Random) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "prompt": [rng.randrange(VOCAB_SIZE - 64) for _ in range(lengths.num_prompt_tokens)],
            "max_tokens": lengths.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def _send(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """From the control host."""
        host, port = self.cluster.http.removeprefix("http://").split(":")
        job = {
            "host": host,
            "port": int(port),
            "path": "/v1/completions",
            "headers": {"Authorization": f"Bearer {self.operator.key}"},
            "requests": requests,
            "comes_back": False,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "bench.streaming.open_load"]
        with (self.folder / "job.json").open("rb") as given, (self.folder / "answers.json").open("wb") as answers:
            process = self.lab["control"].spawn(command, stdin=given, stdout=answers, cwd=ROOT)
            if process.wait(TIMEOUT_S):
                raise subprocess.CalledProcessError(process.returncode, command)
        found: list[list[dict[str, Any]]] = json.loads((self.folder / "answers.json").read_text())
        return [tries[0] for tries in found]


# The simulator


def simulated(found: Arrivals, pack_bytes: int, load_s: float) -> list[RequestOutcome]:
    """``load_s``: of a pack in the host's memory into a slot."""
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
        for number, (at, lengths) in enumerate(found)
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
            load_s = median(loads[1:]) - LATENCY.prefill_s(32)  # the first time, more has to be read
            progress(f"a load takes {load_s * 1e3:.0f} ms")
            for seed in seeds:
                found = arrivals(seed, SEED_S)
                of_real = real.ttfts_s(found, seed)
                of_sim = [outcome.ttft_s for outcome in simulated(found, real.model.pack_bytes, load_s)]
                progress(
                    f"seed {seed}: {len(found)} requests, P50 and P95 measured "
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

"""A burst of a real trace on models that sleep, with live scaling and without.

    python bench/burst.py [--quick] [--trace PATH]

Three hosts with shaped links: two with two prefill workers each, one with a decode worker for each of three models.
All models are at zero. The decode host has their packs in memory, the prefill hosts get them over the links. Every
layer takes a fixed time (`calibration/padded_worker.py`), so two cores suffice.

The burst is the busiest window of the trace, by prompt tokens, with its own times of arrival. Prompts and answers are
shortened by one factor, with which the prompts take ``LOAD`` of what the prefill workers compute in that time once they
are loaded. Models follow a Zipf law. The time to first token that counts as met is that of a load alone and a full
step. The same arrivals run under each strategy in turn: `stop` (an instance computes once it is loaded), `overlap` (it
computes layer by layer as it loads, and keeps its prompts), `live` (loaded instances take its prompts over).
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.live_scaling.arrivals import busiest, scaled, zipf_models
from bench.live_scaling.cluster import DECODE_HOST, STRATEGIES, PaddedCluster, imported_layers, send
from bench.live_scaling.outcome import Outcome, checks_of
from bench.report import finish, parser_of, progress
from tests.lab import Lab
from tests.lab.cluster import HOSTS, TARGETS
from tests.lab.operations import Operator, Published
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.bench.bodies import completion_body
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.sim.traces import Arrival, read_trace

TRACE = Path(__file__).parent / "live_scaling" / "azure_conv_busiest_minute.csv"
RATE_MBIT = 42  # so that a layer takes 160 ms
NUM_LAYERS, STEP_TOKENS, STEP_S = 12, 128, 0.24
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
LATENCY = LatencyModel(StepCost(0.001, STEP_S / STEP_TOKENS, 0.0, 1000), StepCost(0.005, 1e-3, 0.0, 1000), STEP_TOKENS)
NUM_MODELS = 3
NUM_WORKERS = {host: 2 for host in TARGETS if host != DECODE_HOST} | {DECODE_HOST: NUM_MODELS}
NUM_PREFILL = sum(NUM_WORKERS.values()) - NUM_MODELS
LOAD = 0.8  # of the prefill workers, once they are loaded
LONGEST = SHAPE["max_position_embeddings"] // 2


@dataclass(frozen=True, slots=True)
class Form:
    """How much the bench measures."""

    window_s: float
    num_rounds: int


FULL, QUICK = Form(15.0, 5), Form(4.0, 1)


class Bench:
    def __init__(self, cluster: PaddedCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._operator = Operator(cluster)
        self._rng = random.Random(0)
        self._models = [self._publish(number) for number in range(NUM_MODELS)]
        load_s = max(model.pack_bytes for model in self._models) * 8 / (RATE_MBIT * 1e6)
        self.ttft_target_s = round(load_s + STEP_S, 2)
        for model in self._models:
            with cluster.control.inside(), GatewayClient(cluster.http, cluster.admin_key) as admin:
                settings = {"max_instances": NUM_PREFILL, "standard_ttft_s": self.ttft_target_s}
                admin.call("PATCH", f"/v1/models/{model.name}", json=settings)

    def _publish(self, number: int) -> Published:
        checkpoint = make_checkpoint(self._folder / f"model-{number}", "llama", seed=number, **SHAPE)
        model = self._operator.publish(checkpoint)
        self._operator.keep_copies_on(("source", DECODE_HOST), model.pack_id)
        return model

    def run(self, strategy: str, arrivals: Sequence[Arrival], seed: int) -> Outcome:
        """Runs the arrivals from zero; the same ``seed`` gives the same models."""
        self._operator.await_zero()
        for model in self._models:
            self._operator.keep_copies_on((DECODE_HOST,), model.pack_id)
        self._cluster.use(STRATEGIES[strategy])
        names = zipf_models(len(arrivals), [model.name for model in self._models], seed)
        requests = [
            {"at": arrival.at, "body": self._body(name, arrival)} for name, arrival in zip(names, arrivals, strict=True)
        ]
        answers = send(self._cluster, self._operator, self._folder, requests)
        layers = [imported_layers(self._cluster, self._operator, answer["request_id"]) for answer in answers]
        return Outcome.of(answers, layers)

    def _body(self, name: str, arrival: Arrival) -> dict[str, Any]:
        prompt = [self._rng.randrange(VOCAB_SIZE - 64) for _ in range(arrival.num_prompt_tokens)]
        return completion_body(name, prompt, arrival.num_output_tokens)


def main() -> None:
    parser = parser_of(__doc__, "one round of a shorter window, about 75 s")
    parser.add_argument("--trace", type=Path, default=TRACE, help="a CSV file of arrivals (%(default)s)")
    options = parser.parse_args()
    form = QUICK if options.quick else FULL
    trace = busiest(read_trace(options.trace), form.window_s)
    capacity = NUM_PREFILL * form.window_s * STEP_TOKENS / STEP_S
    arrivals, factor = scaled(trace, LOAD * capacity, LONGEST)
    outcomes: dict[str, list[Outcome]] = {strategy: [] for strategy in STRATEGIES}
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        with (
            Lab(HOSTS, rate_mbit=RATE_MBIT) as lab,
            PaddedCluster(lab, folder, LATENCY, NUM_WORKERS, IDLE_TIMEOUT_S="2") as cluster,
        ):
            bench = Bench(cluster, folder)
            bench.run("overlap", arrivals[: NUM_MODELS * 4], -1)  # the scheduler learns how long a load takes
            for number in range(form.num_rounds):
                for strategy in reversed(STRATEGIES) if number % 2 else STRATEGIES:
                    outcome = bench.run(strategy, arrivals, number)
                    outcomes[strategy].append(outcome)
                    progress(f"round {number}, {strategy}: {outcome.summary(bench.ttft_target_s)}")
    conditions = {
        "rounds": form.num_rounds,
        "trace": options.trace.name,
        "window_s": form.window_s,
        "requests": len(arrivals),
        "token_scale": round(factor, 4),
        "time_scale": 1,
        "load": LOAD,
        "models": NUM_MODELS,
        "prefill_workers": NUM_PREFILL,
        "ttft_target_s": bench.ttft_target_s,
    }
    finish("burst", conditions, checks_of(outcomes, bench.ttft_target_s, form.window_s))


if __name__ == "__main__":
    main()

"""Live scaling on two hosts: a burst at a loaded worker, while a second worker loads the model over a shaped link.

    python bench/live.py [--quick]

Every layer takes a fixed time (`calibration/padded_worker.py`), so two cores suffice. Each burst has 12 prompts of a
full step each. `stop`: the second worker computes once it is loaded. `overlap`: it computes layer by layer as it loads,
and keeps its prompts. `live`: the loaded worker takes prompts over with the layers that are computed. The runs of the
three are interleaved; the figures are ratios of medians of the last first token.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.live_scaling.cluster import DECODE_HOST, STRATEGIES, PaddedCluster, imported_layers, send
from bench.report import Check, finish, parser_of, percentile, progress
from tests.lab import Lab
from tests.lab.cluster import HOSTS, TARGETS
from tests.lab.operations import Operator, Published
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.bench.bodies import completion_body
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.control.v1.reports_pb2 import SlotState
from torchrelay.control.v1.scheduler_pb2 import ClusterView
from torchrelay.scheduler.policy.strategies import LoadingPrompts

RATE_MBIT = 42  # so that a layer takes 160 ms
NUM_LAYERS, NUM_PROMPTS, PROMPT_TOKENS = 24, 12, 512
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
STEP_S = 0.48  # a full step of prompts
LATENCY = LatencyModel(
    StepCost(0.001, STEP_S / PROMPT_TOKENS, 0.0, 1000), StepCost(0.005, 1e-3, 0.0, 1000), PROMPT_TOKENS
)
TTFT_S = 1.0  # the objective of all requests, which a burst exceeds


@dataclass(frozen=True, slots=True)
class Burst:
    """The outcome of a burst. ``ttfts_s``: ascending. ``gaps_s``: from the first token, which the prefill worker
    delivers, to the second, for which the decode worker needs all KV.
    """

    ttfts_s: list[float]
    gaps_s: list[float]
    load_s: float
    early_layers: int  # layers of whole prompts that the second worker computed before it was loaded, and kept of use


class Bench:
    def __init__(self, lab: Lab, cluster: PaddedCluster, folder: Path) -> None:
        self._lab, self._cluster, self._folder = lab, cluster, folder
        self._operator = Operator(cluster)
        self._rng = random.Random(0)
        self.model: Published = self._operator.publish(make_checkpoint(folder / "model", "llama", **SHAPE))
        self._operator.keep_copies_on(("source", TARGETS[0], DECODE_HOST), self.model.pack_id)
        with cluster.control.inside(), GatewayClient(cluster.http, cluster.admin_key) as admin:
            settings = {"min_instances": 1, "max_instances": 2, "standard_ttft_s": TTFT_S}
            admin.call("PATCH", f"/v1/models/{self.model.name}", json=settings)

    def burst(self, mode: str, num_prompts: int = NUM_PROMPTS) -> Burst:
        self._cluster.use(LoadingPrompts.NONE)
        host = self._operator.until(_only_host)
        self._operator.keep_copies_on(("source", host, DECODE_HOST), self.model.pack_id)
        self._cluster.use(STRATEGIES[mode])
        load = LoadTimer(self._operator)
        load.start()
        requests = [{"at": 0.0, "body": self._body()} for _ in range(num_prompts)]
        answers = send(self._cluster, self._operator, self._folder, requests)
        load.join()
        ttfts_s = sorted(answer["first_at"] - answer["sent_at"] for answer in answers)
        gaps_s = [answer["last_at"] - answer["first_at"] for answer in answers]
        early = sum(imported_layers(self._cluster, self._operator, answer["request_id"]) for answer in answers)
        return Burst(ttfts_s, gaps_s, load.took_s, early)

    def _body(self) -> dict[str, Any]:
        prompt = [self._rng.randrange(VOCAB_SIZE - 64) for _ in range(PROMPT_TOKENS)]
        return completion_body(self.model.name, prompt, 2)


class LoadTimer(threading.Thread):
    """Measures the duration of the next load."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self._operator, self.took_s = operator, 0.0

    def run(self) -> None:
        self._operator.until(lambda view: _num_loading(view) or None)
        begin_s = time.monotonic()
        self._operator.until(lambda view: None if _num_loading(view) else True)
        self.took_s = time.monotonic() - begin_s


def _num_loading(view: ClusterView) -> int:
    return sum(worker.slot.state == SlotState.STATE_LOADING for worker in view.workers)


def _only_host(view: ClusterView) -> str | None:
    """The host of the only prefill instance, once it is ready and alone."""
    taken = [worker for worker in view.workers if worker.slot.pack_id and worker.host_id != DECODE_HOST]
    if len(taken) != 1 or taken[0].slot.state != SlotState.STATE_READY:
        return None
    return str(taken[0].host_id)


def main() -> None:
    quick = parser_of(__doc__, "one run of each, about a minute").parse_args().quick
    bursts: dict[str, list[Burst]] = {mode: [] for mode in STRATEGIES}
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        with (
            Lab(HOSTS, rate_mbit=RATE_MBIT) as lab,
            PaddedCluster(lab, folder, LATENCY, IDLE_TIMEOUT_S="3") as cluster,
        ):
            bench = Bench(lab, cluster, folder)
            bench.burst("overlap", 18)  # the scheduler learns how long a load takes
            for _ in range(1 if quick else 5):
                for mode, outcomes in bursts.items():
                    burst = bench.burst(mode)
                    outcomes.append(burst)
                    progress(
                        f"{mode}: "
                        + " ".join(f"{ttft_s:.2f}" for ttft_s in burst.ttfts_s)
                        + f" s; load {burst.load_s:.2f} s, {burst.early_layers} layers imported"
                    )
    last_s = {mode: median(burst.ttfts_s[-1] for burst in outcomes) for mode, outcomes in bursts.items()}
    mean_s = {mode: median(sum(burst.ttfts_s) / NUM_PROMPTS for burst in each) for mode, each in bursts.items()}
    gap_s = {mode: percentile([gap_s for burst in each for gap_s in burst.gaps_s], 99) for mode, each in bursts.items()}
    live = bursts["live"]
    early = median(burst.early_layers / (burst.load_s / (STEP_S / NUM_LAYERS)) for burst in live)
    checks = [
        Check("live_over_stop", last_s["live"] / last_s["stop"], "ratio", 0.72, f"stop {last_s['stop']:.2f} s"),
        Check(
            "live_over_overlap", last_s["live"] / last_s["overlap"], "ratio", 0.9, f"overlap {last_s['overlap']:.2f} s"
        ),
        Check("early_work", early, "ratio", 0.6, "layers that it could compute while it loaded", at_least=True),
        Check("live_kv_p99", gap_s["live"] / gap_s["stop"], "ratio", 1.05, f"stop {gap_s['stop'] * 1000:.0f} ms, P99"),
        Check("mean_live_over_stop", mean_s["live"] / mean_s["stop"], "ratio", None, f"stop {mean_s['stop']:.2f} s"),
    ]
    conditions = {
        "runs": len(live),
        "load_s": round(median(burst.load_s for burst in live), 2),
        "last_s": {mode: round(seconds, 3) for mode, seconds in last_s.items()},
    }
    finish("live", conditions, checks)


if __name__ == "__main__":
    main()

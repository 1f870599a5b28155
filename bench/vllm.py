"""vLLM in a slot beside vLLM alone: tokens per second over HTTP, and the time until a model answers.

    python bench/vllm.py [--quick]

Runs in an environment with vLLM (`make test-vllm` makes tests/vllm/.venv). `torchrelay up` has one worker with the
engine vllm; the peer is `vllm serve`, which gets the same load from the same client in the same run. Second part: from
a call of a model whose pack is in the arena to its first token, in a worker that has loaded none, beside vLLM's own
start from disk in a process that has imported vLLM, to its first token.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine import BOTH, COMMON, CONCURRENCIES, Form, sweep
from bench.report import Check, finish, parser_of, progress
from bench.serving.client import PROMPT_TOKENS, Burst, LoadClient, Sample, prompts_of
from bench.serving.models import BenchModel, make_models
from bench.serving.peers import vllm_server
from tests.support.platform import Platform, running_platform

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("config", "engine", "first token")
START_S = 300.0
MID_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from nothing to the first token, and the parts of vLLM's start."""

    ready_s: float
    parts_s: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.ready_s:.2f} s: " + ", ".join(f"{name} {each:.2f}" for name, each in self.parts_s.items())


def own_start(model: BenchModel) -> Start:
    """vLLM's start from disk in a process of its own; its imports do not count."""
    command = [sys.executable, "-m", "bench.serving.vllm_start", str(model.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=START_S)
    parts = json.loads(done.stdout.splitlines()[-1])
    return Start(sum(parts.values()), parts)


def slot_start(platform: Platform, client: LoadClient, model: BenchModel) -> Start:
    """A call of a model whose pack is in the arena, to its first token, in a new worker."""
    before = platform.incarnations()
    platform.await_restart("worker-0", platform.kill("worker-0"))
    for view in platform.views():
        if not view.instances and any(worker.incarnation not in before for worker in view.workers):
            break
    begin_s = time.monotonic()
    client.load([Burst(prompts_of(model, 1), 1, 1)])
    ready_s = time.monotonic() - begin_s
    lines = (platform.home.logs / "worker-0.log").read_text().splitlines()
    event = json.loads(next(line for line in reversed(lines) if '"vllm_started"' in line))
    return Start(ready_s, {part: event[f"{part.replace(' ', '_')}_s"] for part in PARTS})


def measure(root: Path, form: Form) -> list[Check]:
    model = make_models(root, form.mid_layers)[0 if form.mid_layers == 1 else 1]
    with running_platform(root / "home", (*BOTH, *COMMON), env={"TORCHRELAY_ENGINE": "vllm"}) as platform:
        key = platform.tenant("bench")
        client = LoadClient(int(platform.http.rpartition(":")[2]), platform.upload(key, model.folder, model.name), key)
        client.load([Burst(prompts_of(model, 1), 1, 1)])
        mine = sweep(client, model, form)
        slots = [slot_start(platform, client, model) for _ in range(form.rounds)]
    with vllm_server(str(Path(sys.executable).with_name("vllm")), model.folder, root / "vllm.log") as port:
        alone = sweep(LoadClient(port, "peer"), model, form)
    owns = [own_start(model) for _ in range(form.rounds)]
    for start in slots:
        progress(f"in a slot: {start}")
    for start in owns:
        progress(f"alone: {start}")
    checks = [*(token_check(number, mine[number], alone[number]) for number in CONCURRENCIES), ready_check(slots, owns)]
    return checks if form.mid_layers == 1 else [*checks, compiled_check(root, model)]


def token_check(concurrency: int, mine: Sample, alone: Sample) -> Check:
    note = f"{mine} over {alone}"
    return Check(f"tokens_over_alone_{concurrency}", mine.tok_s / alone.tok_s, "", 0.97, note, at_least=True)


def ready_check(slots: list[Start], owns: list[Start]) -> Check:
    mine, own = (min(starts, key=lambda start: start.ready_s) for starts in (slots, owns))
    ratio = statistics.median(each.ready_s for each in slots) / statistics.median(each.ready_s for each in owns)
    return Check("ready_over_own", ratio, "", 0.5, f"best in a slot {mine}; best alone {own}")


def compiled_check(root: Path, model: BenchModel) -> Check:
    env = {"TORCHRELAY_ENGINE": "vllm", "TORCHRELAY_VLLM_GRAPHS": "1"}
    with running_platform(root / "compiled", (*BOTH, *COMMON), env=env) as platform:
        key = platform.tenant("bench")
        client = LoadClient(int(platform.http.rpartition(":")[2]), platform.upload(key, model.folder, model.name), key)
        begin_s = time.monotonic()
        client.load([Burst(prompts_of(model, 1), 1, 1)])
        first_s = time.monotonic() - begin_s
        second = slot_start(platform, client, model)
    return Check("second_over_first_compiled", second.ready_s / first_s, "", 0.5, f"{second} over {first_s:.1f} s")


def main() -> None:
    options = parser_of(__doc__, "the tiny model instead of the mid model, fewer starts").parse_args()
    form = Form(1, 32, 2, 1) if options.quick else Form(MID_LAYERS, 32, 3, 3)
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        checks = measure(Path(folder), form)
    sizes = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": form.output_tokens, "mid_layers": form.mid_layers}
    peer = "vllm serve, eager as in the slot, 1,024 tokens of context, 2 GB of KV, its threads on all cores"
    finish("vllm", {**sizes, "peer": peer, "quick": options.quick}, checks)


if __name__ == "__main__":
    main()

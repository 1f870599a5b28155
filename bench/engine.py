"""Tokens per second through the whole HTTP path, against vLLM's CPU server and the memory bandwidth.

    python bench/engine.py [--quick] [--peer vllm] [--peer-bin PATH]

`torchrelay up` runs with one worker in both roles and `cpu_reorder` on, with random checkpoints, prompts of 64 tokens
and answers of 32. The peer gets the same load from the same client in the same run, on all cores. PATH is its `vllm`
command (default: TORCHRELAY_BENCH_VLLM). Further figures: a repeated prompt; prefill and decode on separate workers;
memory of two workers with `cpu_reorder` off; and transformers' `generate_batch`. --quick uses fewer layers in the mid
model and fewer tokens per request; `conditions` has both.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.cold_start import WORKERS, Model, publish, renew_workers
from bench.report import Check, finish, parser_of, progress
from bench.serving.checks import Measured, apart_checks, memory_checks, model_checks, prefix_check
from bench.serving.client import PROMPT_TOKENS, Burst, LoadClient, Sample, prompts_of
from bench.serving.memory_bound import limit_check, rounds_of
from bench.serving.models import BenchModel, make_models
from bench.serving.peers import generate_batch_tok_s, load_transformers, vllm_server
from bench.serving.worker_memory import await_settled, worker_memory
from tests.support.platform import Platform, running_platform

CONCURRENCIES = (1, 8, 32)
LONG_PROMPT_TOKENS = 1024
BATCHED = 8
ARENA = "/dev/shm/torchrelay-"
SETTINGS = "settings.toml"
BOTH = ("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "1")
APART = ("--prefill-workers", "1", "--decode-workers", "1")
COMMON = ("--arena-mb", "1280", "--idle-timeout-s", "600", "--kv-pool-mb", "256", "--quiet")


@dataclass(frozen=True, slots=True)
class Form:
    """Layers of the mid model, output tokens, requests per connection, rounds of the memory comparison."""

    mid_layers: int
    output_tokens: int
    waves: int
    rounds: int


FULL = Form(mid_layers=24, output_tokens=32, waves=3, rounds=5)
QUICK = Form(mid_layers=8, output_tokens=16, waves=1, rounds=1)


def sweep(client: LoadClient, model: BenchModel, form: Form, workers: Sequence[int] = ()) -> dict[int, Sample]:
    """Samples by concurrency, after a warm-up request, with the CPU time of the processes ``workers``."""
    bursts = [Burst(prompts_of(model, 1), 1, form.output_tokens)]
    for concurrency in CONCURRENCIES:
        prompts = prompts_of(model, max(2, concurrency) * form.waves)
        bursts.append(Burst(prompts, concurrency, form.output_tokens, workers))
    _, *samples = client.load(bursts)
    for concurrency, sample in zip(CONCURRENCIES, samples, strict=True):
        progress(f"{client.model} at {concurrency}: {sample}")
    return dict(zip(CONCURRENCIES, samples, strict=True))


def prefix_ttft_ms(client: LoadClient, model: BenchModel) -> tuple[float, float]:
    """TTFT of a long prompt, and of its repetition."""
    burst = Burst(prompts_of(model, 1, LONG_PROMPT_TOKENS), 1, 2)
    first, second = client.load([burst, burst])
    return first.ttft_ms, second.ttft_ms


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint and its published model, in the home folder that all platforms of a run share."""

    model: BenchModel
    published: Model

    def client(self, platform: Platform) -> LoadClient:
        return LoadClient(int(platform.http.rpartition(":")[2]), self.published.name, self.published.key)

    def settle(self, platform: Platform, workers: Sequence[str]) -> LoadClient:
        """Wakes the model and waits until its weights are settled."""
        client = self.client(platform)
        client.load([Burst(prompts_of(self.model, 1), 1, 2)])
        await_settled([platform.pid(worker) for worker in workers])
        return client


@contextmanager
def platform_of(root: Path, workers: Sequence[str], reorder: bool) -> Iterator[Platform]:
    set_reorder(root, reorder)
    with running_platform(
        root / "home", (*workers, *COMMON), env={"TORCHRELAY_CONFIG": str(root / SETTINGS)}
    ) as platform:
        yield platform


def set_reorder(root: Path, reorder: bool) -> None:
    """Sets `cpu_reorder` for workers started from now on."""
    (root / SETTINGS).write_text(f"cpu_reorder = {str(reorder).lower()}\n")


def measure_shared(platform: Platform, subject: Subject, form: Form) -> tuple[int, int]:
    """The larger of two workers' private bytes, and both workers' share of the arena (PSS)."""
    subject.client(platform).load([Burst(prompts_of(subject.model, BATCHED), BATCHED, form.output_tokens)])
    memory = [worker_memory(platform.pid(worker), ARENA) for worker in WORKERS]
    return max(each.private for each in memory), sum(each.arena_share for each in memory)


def measure_apart(platform: Platform, subject: Subject, form: Form) -> tuple[dict[int, Sample], int]:
    """Prefill and decode on separate workers: figures and the decode worker's private bytes."""
    client = subject.settle(platform, WORKERS)
    samples = sweep(client, subject.model, form, [platform.pid(worker) for worker in WORKERS])
    return samples, worker_memory(platform.pid("decode-0"), ARENA).private


def measure_torchrelay(root: Path, subjects: list[Subject], form: Form) -> Measured:
    """Measurements of a single worker in both roles."""
    samples = {}
    with platform_of(root, BOTH, reorder=True) as platform:
        for subject in subjects:
            client = subject.settle(platform, ["worker-0"])
            samples[subject.model.name] = sweep(client, subject.model, form, [platform.pid("worker-0")])
        mid = subjects[-1].model
        rounds = rounds_of(client, mid, form.rounds, form.waves, form.output_tokens)
        first_ms, again_ms = prefix_ttft_ms(client, mid)
    return Measured(samples, rounds, again_ms / first_ms, first_ms)


def measure_peer(root: Path, command: str, models: list[BenchModel], form: Form) -> dict[str, dict[int, Sample]]:
    samples = {}
    for model in models:
        progress(f"starting vLLM on {model.name}")
        with vllm_server(command, model.folder, root / "vllm.log") as port:
            samples[model.name] = sweep(LoadClient(port, "peer"), model, form)
    return samples


def main() -> None:
    parser = parser_of(__doc__, "fewer layers and tokens, under 50 s without a peer")
    parser.add_argument(
        "--peer", choices=["vllm"], help="measure this peer, too; it starts once per model, which takes half a minute"
    )
    parser.add_argument("--peer-bin", default=os.environ.get("TORCHRELAY_BENCH_VLLM", "vllm"), help="its command")
    options = parser.parse_args()
    form = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        checks = measure(Path(folder), form, options.peer_bin if options.peer else "")
    sizes = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": form.output_tokens, "mid_layers": form.mid_layers}
    finish("engine", {**sizes, "quick": options.quick}, checks)


def measure(root: Path, form: Form, peer: str) -> list[Check]:
    progress(f"making the checkpoints: tiny, and mid of {form.mid_layers} layers")
    with ThreadPoolExecutor(1) as thread:  # work done while the platform starts
        making, loading = thread.submit(make_models, root, form.mid_layers), thread.submit(load_transformers)
        with platform_of(root, APART, reorder=False) as platform:
            models, key = making.result(), platform.tenant("bench")
            subjects = [Subject(model, publish(platform, model.folder, key, model.name)) for model in models]
            mid, hf = subjects[-1], loading.result()
            private_off, arena_pss = measure_shared(platform, mid, form)
            set_reorder(root, True)
            renew_workers(platform)
            split, private_on = measure_apart(platform, mid, form)
    batched = [generate_batch_tok_s(hf, each.folder, prompts_of(each, BATCHED), form.output_tokens) for each in models]
    mine = measure_torchrelay(root, subjects, form)
    peers = measure_peer(root, peer, models, form) if peer else {}
    checks = [check for model in models for check in model_checks(model, mine, peers)]
    checks += [limit_check(mid.model, mine.rounds), prefix_check(mine)]
    for model, tok_s in zip(models, batched, strict=True):
        against = f"transformers, {BATCHED} at once"
        checks.append(Check(f"{model.name}_generate_batch_tok_s", tok_s, "tok/s", None, against))
    checks += apart_checks(mid.model, mine.samples[mid.model.name], split)
    return checks + memory_checks(mid.model, private_off, private_on, arena_pss)


if __name__ == "__main__":
    main()

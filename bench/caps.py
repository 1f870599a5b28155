"""The cost of the limits of models: decode steps and placements with and without them, in the same run.

    python bench/caps.py [--quick]

First, decode steps of an instance on a CPU, with one thread: eight answers decode under a limit of threads, and eight
without, in turns. Both take their share of the cores through a file, as the workers of
`torchrelay up` do. Limits of requests and of KV touch no step: the scheduler keeps them when it places a request. So
the second figure is a placement among 16 instances, of a model with and without such limits, in turns. An answer of
256 tokens has one placement and 255 steps, of which each is shared by the batch; `caps_overhead` is what the limits add
to their sum, as a share of it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRITON_INTERPRET", "1")  # the harness of the tests asks for it

import torch

from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, progress
from tests.support.checkpoints import make_checkpoint
from tests.unit.engine.harness import Model, group_of, prompt_of
from tests.unit.scheduler.policy.dispatch.test_placement import MODEL, NOW, a_candidate, a_state, an_admission, place_at
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.threads import ThreadBudget
from torchrelay.scheduler.policy.types import BOTH, Placement

NUM_ANSWERS, NUM_TOKENS, NUM_INSTANCES = 8, 256, 16
POOL_BYTES = 64 << 20
MAX_OVERHEAD = 0.01


def decode_steps(model: Model, folder: Path) -> list[Iterator[Callable[[], object]]]:
    """Endless steps of one instance, in which a batch of answers decodes: with a limit of threads, and without. The
    same instance for both, because two differ in where their weights lie.
    """
    num_bytes = model.pack.manifest.num_bytes
    budgets = [
        ThreadBudget(num_bytes, ActiveProcesses(folder / f"cores-{limit}"), 0, max_threads=limit) for limit in (1, 0)
    ]
    instance = model.instance(pool_bytes=POOL_BYTES)

    def is_decoding() -> bool:
        return bool(instance.step().num_positions_decoded == NUM_ANSWERS)

    def steps(budget: ThreadBudget) -> Iterator[Callable[[], object]]:
        while True:
            if not instance.has_work():
                for number in range(NUM_ANSWERS):
                    sampling = SamplingParams(max_tokens=NUM_TOKENS)
                    instance.prefill(group_of(prompt_of(32, number), f"r{number}/0", sampling))
                while not is_decoding():
                    pass
            instance._threads = budget
            yield instance.step

    return [steps(budget) for budget in budgets]


def placements(max_concurrency: int, kv_share: float) -> Iterator[Callable[[], object]]:
    state = a_state()
    model = replace(MODEL, max_concurrency=max_concurrency, kv_share=kv_share)
    state.note_model(model, NOW)
    instances = [a_candidate(f"w{number}", BOTH, num_decoding=8) for number in range(NUM_INSTANCES)]
    admission = an_admission(model, "r")

    def place_one() -> None:
        assert isinstance(place_at(admission, *instances, state=state, model=model), Placement)

    while True:
        yield place_one


def paired_s(kinds: list[Iterator[Callable[[], object]]], seconds: float) -> tuple[float, float, int]:
    """The median time of a call of the second kind, and the median of what the first kind takes longer, by turns."""
    plain: list[float] = []
    added: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        order = (0, 1) if len(plain) % 2 else (1, 0)
        took = [0.0, 0.0]
        for kind in order:
            call = next(kinds[kind])
            begin = time.perf_counter()
            call()
            took[kind] = time.perf_counter() - begin
        plain.append(took[1])
        added.append(took[0] - took[1])
    return statistics.median(plain), statistics.median(added), len(plain)


def main() -> None:
    is_quick = parser_of(__doc__, "fewer turns, under 50 s").parse_args().quick
    torch.set_num_threads(1)
    seconds = 30.0 if is_quick else 120.0
    with tempfile.TemporaryDirectory() as folder:
        progress("decode steps")
        model = Model(make_checkpoint(Path(folder) / "model", "llama", **LLAMA_33MB))
        step_s, step_added_s, num_turns = paired_s(decode_steps(model, Path(folder)), seconds)
    progress("placements")
    place_s, place_added_s, num_placed = paired_s([placements(1000, 0.9), placements(0, 1.0)], seconds / 10)
    num_steps = NUM_TOKENS - 1
    overhead = (num_steps * step_added_s + place_added_s) / (num_steps * step_s + place_s)
    conditions = {
        "quick": is_quick, "turns_of_steps": num_turns, "turns_of_placements": num_placed,
        "answers_at_once": NUM_ANSWERS, "instances": NUM_INSTANCES,
    }  # fmt: skip
    checks = [
        Check("caps_overhead", overhead, "", MAX_OVERHEAD, "the same answers without limits, in turns"),
        Check("step_ms", 1e3 * step_s, "ms", against=f"{1e6 * step_added_s:+.2f} us with a limit"),
        Check("placement_us", 1e6 * place_s, "us", against=f"{1e6 * place_added_s:+.2f} us with limits"),
    ]
    finish("caps", conditions, checks)


if __name__ == "__main__":
    main()

"""Weights in int8 against the same weights in bf16: tokens per second, and a cold start over a shaped link.

    python bench/quantised.py [--quick]

The lab's hosts run the control services, a store with both packs, and a store with a worker of one thread, joined by
links of 400 Mbit/s. The model's embeddings are 13 % of its bytes, as those of Llama 3.1 8B, and stay in bf16. It is
published as it is, and as `torchrelay upload --quantize int8` publishes it. In each round, for both in turn, a streamed
request finds the model at zero and its pack on the other host; then warm requests follow, one at a time. Times are the
client's.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.live_scaling.cluster import send
from bench.random_checkpoint import LlamaShape, write_checkpoint
from bench.report import Check, finish, parser_of, progress
from bench.serving.models import write_tokenizer
from tests.lab import Lab
from tests.lab.child import Child
from tests.lab.cluster import HOSTS, TARGETS, Cluster
from tests.lab.host import Host
from tests.lab.operations import Operator, Published
from torchrelay.cli.bench.bodies import completion_body

RATE_MBIT = 400
SHAPE = LlamaShape(vocab_size=15_360, num_layers=8, hidden=1024, intermediate=2816)
ARENA_BYTES = 448 << 20
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 48
IDLE_TIMEOUT_S = 1.0


class OneWorker(Cluster):
    """A cluster with a worker on one host, and arenas for both packs."""

    def _workers(self, hosts: Sequence[Host]) -> list[Child]:
        return super()._workers(hosts[:1])

    def _store(self, host: Host) -> Child:
        child = super()._store(host)
        size = ARENA_BYTES if host.name in ("source", TARGETS[0]) else 8 << 20
        child.env = {**child.env, "TORCHRELAY_ARENA_BYTES": str(size)}
        return child


def measure(cluster: Cluster, operator: Operator, folder: Path, model: Published, num_warm: int) -> tuple[float, float]:
    """Seconds to the first token with the pack on the other host, and the median of a token's seconds when warm."""
    operator.await_zero()
    operator.keep_copies_on(("source",), model.pack_id)

    def answer() -> tuple[float, float]:
        prompt = [random.randrange(256, SHAPE.vocab_size) for _ in range(PROMPT_TOKENS)]
        body = completion_body(model.name, prompt, OUTPUT_TOKENS)
        (timed,) = send(cluster, operator, folder, [{"at": 0.0, "body": body}])
        token_s = (timed["ended_at"] - timed["first_at"]) / (OUTPUT_TOKENS - 1)
        return timed["first_at"] - timed["sent_at"], token_s

    wake_s, _ = answer()
    return wake_s, median(answer()[1] for _ in range(num_warm))


def main() -> None:
    quick = parser_of(__doc__, "one round, under 50 s").parse_args().quick
    num_rounds, num_warm = (1, 3) if quick else (5, 5)
    wake_s: dict[str, list[float]] = {"bf16": [], "int8": []}
    token_s: dict[str, list[float]] = {"bf16": [], "int8": []}
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        progress(f"making the checkpoint, {SHAPE.num_bytes >> 20} MB in bf16")
        checkpoint = write_checkpoint(folder / "checkpoint", SHAPE, b"")
        write_tokenizer(checkpoint, SHAPE.vocab_size)
        with (
            Lab(HOSTS, rate_mbit=RATE_MBIT) as lab,
            OneWorker(lab, folder, IDLE_TIMEOUT_S=str(IDLE_TIMEOUT_S)) as cluster,
        ):
            operator = Operator(cluster)
            models = {
                "bf16": operator.publish(checkpoint, "bf16"),
                "int8": operator.publish(checkpoint, "int8", quantize="int8"),
            }
            for _ in range(num_rounds):
                for kind, model in models.items():
                    woken_s, each_s = measure(cluster, operator, folder, model, num_warm)
                    wake_s[kind].append(woken_s)
                    token_s[kind].append(each_s)
                    progress(f"{kind}: first token after {woken_s:.2f} s, then {each_s * 1e3:.1f} ms each")
    wakes, tokens = ({kind: median(times) for kind, times in by.items()} for by in (wake_s, token_s))
    sizes = {kind: model.pack_bytes for kind, model in models.items()}
    speeds = f"{1 / tokens['int8']:.1f} against {1 / tokens['bf16']:.1f} tokens/s"
    waits = f"{wakes['int8']:.2f} s against {wakes['bf16']:.2f} s"
    packs = f"{sizes['int8'] >> 20} MiB against {sizes['bf16'] >> 20} MiB"
    checks = [
        Check("int8_over_bf16", tokens["bf16"] / tokens["int8"], "ratio", 1.5, speeds, at_least=True),
        Check("int8_wake_ratio", wakes["int8"] / wakes["bf16"], "ratio", 0.6, waits),
        Check("int8_pack_ratio", sizes["int8"] / sizes["bf16"], "ratio", None, packs),
    ]
    conditions = {"rounds": num_rounds, "link_mbit": RATE_MBIT, "prompt_tokens": PROMPT_TOKENS, "threads": 1}
    finish("quantised", conditions, checks)


if __name__ == "__main__":
    main()

"""Role changes in place, against loads of the same model from the host's memory.

    python bench/roles.py [--quick]

`torchrelay up` runs with padded workers: a layer takes 20 ms for a prompt of 512 tokens, and 160 ms to load, as if the
weights were copied to a device. A worker that has the model gets the other role, and a request at once; the time counts
until its first token in that role. The same worker then loads the model for that role, with the same request.

At first the model is loaded for a stream, whose comments tell how long that takes: `eta_error` is the distance from the
time that a comment tells to the time until the first token, as a share of the latter, in the median of the comments.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.calibration.padding import padded_workers
from bench.report import Check, finish, parser_of
from bench.scaling.role_change import measured
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import wake
from tests.support.platform import running_platform
from torchrelay.common.latency.latency_model import LatencyModel, StepCost

NUM_LAYERS, PROMPT_TOKENS = 24, 512
LAYER_S, LAYER_LOAD_S, DECODE_STEP_S = 0.02, 0.16, 0.03
LATENCY = LatencyModel(
    prefill=StepCost(per_position_s=NUM_LAYERS * LAYER_S / PROMPT_TOKENS, num_steps=1000),
    decode=StepCost(base_s=DECODE_STEP_S, num_steps=1000),
    token_budget=PROMPT_TOKENS,
)


def main() -> None:
    num_samples = 1 if parser_of(__doc__, "one sample, under 50 s").parse_args().quick else 5
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        root = Path(folder)
        checkpoint = make_checkpoint(
            root / "model", "llama", num_hidden_layers=NUM_LAYERS, max_position_embeddings=1024
        )
        options = ("--arena-mb", "256", "--threads", "1", "--idle-timeout-s", "600", "--quiet")
        workers = ("--prefill-workers", "2", "--decode-workers", "1")
        env = {"TORCHRELAY_PREFIX_CACHE": "false", **padded_workers(root, LATENCY, LAYER_LOAD_S)}
        with running_platform(root / "home", (*options, *workers), env) as platform:
            key = platform.tenant("bench")
            prompt = [token % 250 for token in range(PROMPT_TOKENS)]
            told, first_token_s = wake(platform, key, platform.upload(key, checkpoint, "model"), prompt[:8])
            checks = asyncio.run(measured(platform, prompt, num_samples))
    left_s = [(each.left_s, first_token_s - each.at_s) for each in told]
    error = median(abs(predicted_s - real_s) / real_s for predicted_s, real_s in left_s)
    note = ", ".join(f"{predicted_s:.1f} of {real_s:.1f} s" for predicted_s, real_s in left_s)
    checks.append(Check("eta_error", error, "ratio", None, note))
    conditions = {
        "samples": num_samples,
        "layers": NUM_LAYERS,
        "prompt_tokens": PROMPT_TOKENS,
        "padded_layer_s": LAYER_S,
        "padded_layer_load_s": LAYER_LOAD_S,
        "workers": "2 prefill, 1 decode, one host",
    }
    finish("roles", conditions, checks)


if __name__ == "__main__":
    main()

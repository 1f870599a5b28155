"""The engine on an NVIDIA GPU: exactness, copies from the arena, and decode and prefill against the device's limits.

    python bench/gpu.py [--quick] [--profile] [--cpu-rehearsal]

It runs from a checkout on a machine with a GPU, torch, triton, transformers, safetensors, tokenizers and numpy. It
reads Torchrelay's packages from libs/ and starts no process. The model has the shape of Llama 3.1 8B and random weights
in bf16. ``--profile`` also prints the kernels of a decode step. ``--cpu-rehearsal`` runs everything with tiny shapes on
the CPU, with Triton's interpreter: its figures mean nothing, and no bound applies.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, progress

if TYPE_CHECKING:
    import torch

    from bench.device.packs import Pack
    from torchrelay.engine.instance import Instance

ROOT = Path(__file__).resolve().parents[1]
sys.path.extend(str(ROOT / "libs" / name / "src") for name in ("common", "modelspec", "transfer", "engine"))
NEEDED = ("numpy", "torch", "triton", "transformers", "safetensors", "tokenizers")
GB = 10**9


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    config: dict[str, Any]
    families: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    num_prompt_tokens: int
    num_steps: int
    num_prefill_tokens: int
    matrix: int
    limit_bytes: int
    peer_batches: tuple[int, ...]
    num_prefills: int = 4


def sizes_of(quick: bool, rehearsal: bool) -> Sizes:
    from bench.device.packs import LLAMA_8B

    if rehearsal:
        tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        tiny |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512}
        return Sizes(LLAMA_8B | tiny, ("llama",), (1, 5), (1, 2), 3, 1, 4, 64, 1 << 20, (1,), num_prefills=1)
    if quick:
        config = LLAMA_8B | {"num_hidden_layers": 8}
        return Sizes(config, ("llama", "gemma2"), (1, 17, 150), (1, 32), 128, 32, 4096, 8192, 2 * GB, (1,))
    families = ("llama", "llama3-rope", "qwen3", "mistral", "gemma2", "gemma3")
    return Sizes(LLAMA_8B, families, (1, 15, 17, 70, 300), (1, 32, 256), 512, 64, 8192, 8192, 4 * GB, (1, 32, 256))


@dataclass
class Bench:
    """A run that collects ``checks``; a part that fails does not end the other parts."""

    sizes: Sizes
    device: torch.device
    rehearsal: bool
    checks: list[Check]

    def add(
        self, name: str, value: float, unit: str, bound: float | None = None, against: str = "", at_least: bool = True
    ) -> None:
        self.checks.append(Check(name, value, unit, None if self.rehearsal else bound, against, at_least))

    def part(self, title: str, names: dict[str, float | None], run: Callable[[], None]) -> None:
        """Runs a part of the bench. ``names``: the bounded figures of the part, with their bounds."""
        progress(title)
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            for name in names.keys() - {check.name for check in self.checks}:
                self.add(name, math.nan, "", names[name], f"failed: {error}"[:100])

    def run(self, with_profile: bool) -> None:
        import torch

        self.part("exactness, fp32", {"triton_mismatches": 0.0}, self.exactness)
        self.part("the engine", {"decode_b1_over_hbm": 0.75}, lambda: self.engine(with_profile))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the engine's memory
        self.part("transformers", {}, self.peer)

    def engine(self, with_profile: bool) -> None:
        from bench.device import engine
        from bench.device.packs import random_pack
        from torchrelay.engine.kv.pool import KvPool

        pack = random_pack(self.sizes.config, "BF16", self.device)
        self.part("arena to device", {"arena_to_device_over_pinned": 0.9}, lambda: self.copies(pack))
        config = self.sizes.config
        token_bytes = kv_bytes(config)
        num_positions = max(self.sizes.batches) * (self.sizes.num_prompt_tokens + self.sizes.num_steps + 64)
        num_positions = max(num_positions, 2 * self.sizes.num_prefill_tokens)
        pool = KvPool(num_positions * token_bytes, str(self.device))
        instance, load_s = engine.load_s(pack, pool)
        self.add(
            "load_to_first_token_s",
            load_s,
            "s",
            None,
            "all segments are in the arena; kernels may be compiled",
        )
        self.part("prefill", {"prefill_over_matmul": 0.5}, lambda: self.prefill(instance, pack))
        self.part("decode", {"decode_b1_over_hbm": 0.75}, lambda: self.decode(instance, pack, token_bytes))
        if with_profile and not self.rehearsal:
            print(engine.profile_table(instance, 1, self.sizes.num_prompt_tokens))
        instance.close()

    def exactness(self) -> None:
        from bench.device import engine

        sizes = self.sizes
        num_tokens = 2 if self.rehearsal else 24
        by_triton, by_gather, total = engine.mismatches(sizes.families, sizes.lengths, num_tokens, self.device)
        against = f"of {total} greedy continuations, transformers on the CPU"
        self.add("triton_mismatches", by_triton, "prompts", 0.0, against, at_least=False)
        self.add("gather_mismatches", by_gather, "prompts", 0.0, against, at_least=False)

    def copies(self, pack: Pack) -> None:
        from bench.device import limits

        pinned = limits.pinned_bytes_per_s(self.device, self.sizes.limit_bytes)
        self.add("pinned_copy_gb_s", pinned / GB, "GB/s")
        staged, _ = limits.staged_bytes_per_s(pack, self.device)
        self.add("arena_to_device_gb_s", staged / GB, "GB/s")
        self.add("arena_to_device_over_pinned", staged / pinned, "", 0.9, "one copy from pinned memory")
        if self.device.type == "cuda":
            direct, pinning = limits.staged_bytes_per_s(pack, self.device, registered=True)
            self.add("registered_over_pinned", direct / pinned, "", None, "from an arena pinned beforehand")
            self.add("register_gb_s", pinning / GB, "GB/s", None, "pinning the arena in place")

    def prefill(self, instance: Instance, pack: Pack) -> None:
        import torch

        from bench.device import engine, limits

        num_tokens = self.sizes.num_prefill_tokens
        elapsed = engine.prefill_s(instance, num_tokens, self.sizes.num_prefills)
        limit = limits.product_flops_per_s(self.device, self.sizes.matrix, torch.bfloat16)
        rate = prefill_flops(self.sizes.config, pack.num_bytes, num_tokens) / elapsed
        self.add("matmul_tflop_s", limit / 1e12, "Tflop/s", None, f"{self.sizes.matrix} square, bf16")
        self.add("prefill_tok_s", num_tokens / elapsed, "tok/s", None, f"a prompt of {num_tokens}")
        self.add("prefill_over_matmul", rate / limit, "", 0.5, "the matrix rate")

    def decode(self, instance: Instance, pack: Pack, token_bytes: int) -> None:
        from bench.device import engine, limits

        read = limits.read_bytes_per_s(self.device, self.sizes.limit_bytes)
        self.add("hbm_read_gb_s", read / GB, "GB/s")
        sizes = self.sizes
        for batch in sizes.batches:
            step_s = engine.decode_step_s(instance, batch, sizes.num_prompt_tokens, sizes.num_steps)
            num_positions = batch * (sizes.num_prompt_tokens + sizes.num_steps // 2)
            num_bytes = pack.num_bytes - pack.segment_bytes(0) + num_positions * token_bytes
            against = f"{num_bytes / GB:.1f} GB per step, contexts of {sizes.num_prompt_tokens}"
            self.add(f"decode_b{batch}_tok_s", batch / step_s, "tok/s", None, f"{step_s * 1e3:.2f} ms per step")
            bound = 0.75 if batch == 1 else None
            self.add(f"decode_b{batch}_over_hbm", num_bytes / read / step_s, "", bound, against)

    def peer(self) -> None:
        import torch

        from bench.device.transformers_peer import Peer

        sizes = self.sizes
        peer = Peer(sizes.config, torch.bfloat16, self.device)
        for batch in sizes.peer_batches:
            step_s = peer.decode_step_s(batch, sizes.num_prompt_tokens, min(sizes.num_steps, 16))
            self.add(f"transformers_b{batch}_tok_s", batch / step_s, "tok/s")
        elapsed = peer.prefill_s(sizes.num_prefill_tokens)
        self.add("transformers_prefill_tok_s", sizes.num_prefill_tokens / elapsed, "tok/s")


def kv_bytes(config: dict[str, Any]) -> int:
    """KV bytes of one position over all layers, in bf16."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2)


def prefill_flops(config: dict[str, Any], weight_bytes: int, num_tokens: int) -> float:
    """Flops of a prefill: two per layer weight and token, four per head element and pair of positions."""
    num_outer_weights = 2 * config["vocab_size"] * config["hidden_size"]  # embeddings and head
    num_layer_weights = weight_bytes / 2 - num_outer_weights
    pairs = num_tokens * (num_tokens + 1) / 2
    return float(2 * num_layer_weights * num_tokens + 4 * config["num_hidden_layers"] * config["hidden_size"] * pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="8 of 32 layers and fewer batches, under 50 s")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a decode step")
    parser.add_argument(
        "--cpu-rehearsal",
        action="store_true",
        help="test the bench on the CPU with tiny shapes",
    )
    options = parser.parse_args()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        parser.error(f"{', '.join(missing)} not installed: pip install {' '.join(NEEDED)}")
    rehearsal: bool = options.cpu_rehearsal
    os.environ["TRITON_INTERPRET"] = "1" if rehearsal else "0"  # before triton is imported

    import torch
    import transformers
    import triton

    if not rehearsal and not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU here; --cpu-rehearsal tests the bench without a GPU")
    device = torch.device("cpu" if rehearsal else "cuda:0")
    conditions = {
        "device": "cpu, Triton interpreted: a rehearsal, the figures mean nothing" if rehearsal else gpu_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "quick": options.quick,
        "rehearsal": rehearsal,
    }
    bench = Bench(sizes_of(options.quick, rehearsal), device, rehearsal, [])
    conditions["layers"] = bench.sizes.config["num_hidden_layers"]
    bench.run(options.profile)
    finish("gpu", conditions, bench.checks)


def gpu_name(device: torch.device) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / GB:.0f} GB, {gpu.multi_processor_count} processors"


if __name__ == "__main__":
    main()

"""Cold start: from zero to the first token, with the parameters in host memory or on disk only.

    python bench/cold_start.py [--quick]

Each cold sample runs in worker processes that never hosted the model, with the prefix cache off; the warm median of the
same prompt is subtracted. The limit of the disk case is the time of an O_DIRECT read of the pack's file into a reused
buffer in the same run.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, progress
from tests.support.checkpoints import make_checkpoint
from tests.support.platform import Platform, running_platform
from torchrelay.cli.bench.bodies import completion_body
from torchrelay.cli.up.plan import STORE_ID
from torchrelay.control.v1 import param_store_pb2, param_store_pb2_grpc, reports_pb2

SMALL: dict[str, Any] = {  # 32 MB in fp32
    "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 1024,
}  # fmt: skip
MID: dict[str, Any] = {  # 583 MB in bf16
    "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 1024,
}  # fmt: skip
WORKERS = ("prefill-0", "decode-0")
PROMPT = list(range(1, 65))
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """A published checkpoint and a key that may call it."""

    name: str
    pack_id: str
    pack_bytes: int
    key: str


def first_token_s(platform: Platform, model: Model) -> float:
    """Seconds from the start of a streamed request to its first token."""
    body = completion_body(model.name, PROMPT, 2)
    headers = {"Authorization": f"Bearer {model.key}"}
    begin, first = time.perf_counter(), 0.0
    with httpx.stream("POST", f"{platform.http}/v1/completions", json=body, headers=headers, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - begin
    if not first:
        raise RuntimeError(f"no token arrived: status {response.status_code}")
    return first


def publish(platform: Platform, folder: Path, key: str, name: str) -> Model:
    packs = platform.home.path / "remote" / "packs"
    before = set(packs.glob("*.manifest"))
    published = platform.upload(key, folder, name)
    (manifest,) = set(packs.glob("*.manifest")) - before
    return Model(published, manifest.stem, (packs / manifest.stem).stat().st_size, key)


def renew_workers(platform: Platform) -> None:
    """Restarts the workers until the scheduler sees free slots."""
    before = {child: platform.kill(child) for child in WORKERS}
    for child, pid in before.items():
        platform.await_restart(child, pid)
    for view in platform.views():
        slots = {worker.worker_id: worker.slot.state for worker in view.workers}
        if not view.instances and all(slots.get(child) == reports_pb2.SlotState.STATE_FREE for child in WORKERS):
            return


def drop_host_copy(platform: Platform, model: Model) -> None:
    """Drops the host copies, which leaves the pack on disk only."""
    epoch = next(iter(platform.views())).epoch
    with platform.channel(platform.endpoints["store"], STORE_ID) as channel:
        stub = param_store_pb2_grpc.ParamStoreStub(channel)
        request = param_store_pb2.DropRequest(epoch=epoch, pack_id=model.pack_id)
        deadline = time.monotonic() + 30
        while not stub.Drop(request).dropped:  # until the killed worker's pin is gone
            if time.monotonic() > deadline:
                raise RuntimeError("the pack stayed pinned")
            time.sleep(0.05)


def direct_read_s(path: Path) -> float:
    """Seconds to read a file with O_DIRECT into one reused, page-aligned buffer."""
    buffer = mmap.mmap(-1, READ_BYTES)
    buffer.write(bytes(READ_BYTES))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        begin, offset = time.perf_counter(), 0
        while count := os.preadv(descriptor, [buffer], offset):
            offset += count
        return time.perf_counter() - begin
    finally:
        os.close(descriptor)


def cold_samples(platform: Platform, model: Model, count: int, from_disk: bool) -> list[float]:
    samples = []
    for _ in range(count):
        renew_workers(platform)
        if from_disk:
            drop_host_copy(platform, model)
        samples.append(first_token_s(platform, model))
        progress(f"{model.name} cold from {'disk' if from_disk else 'host'}: {samples[-1] * 1000:.0f} ms")
    return samples


def main() -> None:
    parser = parser_of(__doc__, "fewer samples, under 50 s")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        root = Path(folder)
        progress("making the checkpoints")
        small = make_checkpoint(root / "small", "llama", dtype="float32", **SMALL)
        mid = make_checkpoint(root / "mid", "llama", dtype="bfloat16", **MID)
        options = ("--arena-mb", "1280", "--idle-timeout-s", "600")
        with running_platform(root / "home", options, env={"TORCHRELAY_PREFIX_CACHE": "false"}) as platform:
            key = platform.tenant("bench")
            models = [publish(platform, small, key, "small"), publish(platform, mid, key, "mid")]
            measure(
                platform, models, num_host=1 if quick else 5, num_disk=3 if quick else 5, num_warm=3 if quick else 9
            )


def measure(platform: Platform, models: list[Model], num_host: int, num_disk: int, num_warm: int) -> None:
    host, warm = {}, {}
    for model in models:
        first_token_s(platform, model)  # creates the host copy
        warm[model.name] = statistics.median(first_token_s(platform, model) for _ in range(num_warm))
        host[model.name] = statistics.median(cold_samples(platform, model, num_host, from_disk=False))
    mid = models[1]
    disk = statistics.median(cold_samples(platform, mid, num_disk, from_disk=True))
    path = platform.home.path / "remote" / "packs" / mid.pack_id
    read_s = statistics.median(direct_read_s(path) for _ in range(3))
    starts = [worker.slot_start_s for worker in next(iter(platform.views())).workers]
    names = [model.name for model in models]
    extra = {name: (host[name] - warm[name]) * 1000 for name in names}
    limit = f"O_DIRECT read of {mid.pack_bytes >> 20} MiB: {read_s * 1000:.0f} ms"
    checks = [
        Check("host_32mb_ms", extra[names[0]], "ms", 120, f"warm median {warm[names[0]] * 1000:.0f} ms"),
        Check("host_583mb_ms", extra[names[1]], "ms", 300, f"warm median {warm[names[1]] * 1000:.0f} ms"),
        Check("disk_583mb_ratio", (disk - host[mid.name]) / read_s, "ratio", 1.3, limit),
        Check("slot_start_s", statistics.median(starts), "s", None, "vLLM CPU, process start to first token: 25 s"),
    ]
    conditions = {
        "prompt_tokens": len(PROMPT),
        "host_samples": num_host,
        "disk_samples": num_disk,
        "workers": "1 prefill, 1 decode, one host",
    }
    finish("cold_start", conditions, checks)


if __name__ == "__main__":
    main()

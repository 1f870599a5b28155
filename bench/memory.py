"""Peak memory of gateway, scheduler and param-store while a large upload passes through them.

    python bench/memory.py [--quick]

`torchrelay up` runs. A first chat makes the gateway load the decoder of a tokenizer with 128,000 entries, and a text
process the whole tokenizer. Then 2 GB of weights (300 MB with --quick) are uploaded and packed. /proc is read every
20 ms from the start of the platform, with the kernel's peak sizes of gateway and scheduler. 1 MB is 10**6 bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.processes import MB, children, is_forking, memory_bytes, sampled
from bench.random_checkpoint import LlamaShape, write_checkpoint
from bench.report import Check, finish, parser_of, progress
from tests.support.platform import Platform, running_platform
from tests.support.sample_tokenizers import large_tokenizer

VOCAB_SIZE = 128_000
SMALL = LlamaShape(VOCAB_SIZE + 64, num_layers=2, hidden=64, intermediate=128, head_dim=32)
LARGE = LlamaShape(VOCAB_SIZE + 64, num_layers=0, hidden=1024, intermediate=4096)


class Peaks:
    """Peak sizes of the services in bytes, by name. ``run``: the folder in which they state their process ids."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.bytes: dict[str, int] = {}
        self.num_samples = 0

    def megabytes(self, name: str) -> float:
        return self.bytes.get(name, 0) / MB

    def sample(self) -> None:
        self.num_samples += 1
        for service in ("gateway", "scheduler", "param-store"):
            if (pid := self._pid(service)) is not None:
                self._sample(service, pid)

    def _pid(self, service: str) -> int | None:
        try:
            pid: int = json.loads((self._run / f"{service}.json").read_text())["pid"]
            return pid
        except FileNotFoundError:
            return None  # it does not serve yet

    def _sample(self, service: str, pid: int) -> None:
        own = memory_bytes(pid)
        below = [memory_bytes(child) for child in children(pid) if not is_forking(child, pid)]
        children_bytes = sum(sizes.get("VmRSS", 0) for sizes in below)
        self._note(f"{service} children", children_bytes)
        if service == "param-store":  # the arena is the cache of the host, not memory of the store
            beside = own.get("RssAnon", 0) + own.get("RssFile", 0)
            self._note("param-store alone", beside)
            self._note(service, beside + children_bytes)
        else:
            self._note(service, max(own.get("VmRSS", 0), own.get("VmHWM", 0)))

    def _note(self, name: str, num_bytes: int) -> None:
        self.bytes[name] = max(self.bytes.get(name, 0), num_bytes)


def chat(platform: Platform, key: str, model: str) -> None:
    """Sends a chat, which makes the gateway load tokenizer and template."""
    body = {"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": "What is a cold start?"}]}
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{platform.http}/v1/chat/completions"
    httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False).raise_for_status()


def main() -> None:
    parser = parser_of(__doc__, "300 MB instead of 2 GB, under 50 s")
    upload_mb = 300 if parser.parse_args().quick else 2000
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        root = Path(folder)
        progress("writing the checkpoints")
        tokenizer_json = large_tokenizer(VOCAB_SIZE)
        small = write_checkpoint(root / "small", SMALL, tokenizer_json)
        large = write_checkpoint(root / "large", LARGE.grown_to(upload_mb * MB), tokenizer_json)
        peaks = Peaks(root / "home" / "run")
        options = ("--arena-mb", str(upload_mb * 3 // 2), "--idle-timeout-s", "600")
        with sampled(peaks.sample), running_platform(root / "home", options) as platform:
            upload_s = drive(platform, peaks, small, large)
        report(peaks, (large / "model.safetensors").stat().st_size, upload_s)


def drive(platform: Platform, peaks: Peaks, small: Path, large: Path) -> float:
    """Runs chats and uploads; returns the seconds of the large upload, with hashing and packing."""
    key = platform.tenant("bench")
    model = platform.upload(key, small, "small")
    chat(platform, key, model)
    progress(f"a tokenizer of {VOCAB_SIZE:,} is loaded: gateway {peaks.megabytes('gateway'):.0f} MB")
    begin = time.perf_counter()
    platform.upload(key, large, "large")
    upload_s = time.perf_counter() - begin
    progress(f"uploaded and packed in {upload_s:.1f} s")
    chat(platform, key, model)
    return upload_s


def report(peaks: Peaks, num_bytes: int, upload_s: float) -> None:
    beside = "beside the arena, with the packer"
    checks = [
        Check("gateway_peak_mb", peaks.megabytes("gateway"), "MB", 150, f"one decoder of {VOCAB_SIZE:,} loaded"),
        Check("gateway_children_mb", peaks.megabytes("gateway children"), "MB", None, "templates, tokenizers"),
        Check("scheduler_peak_mb", peaks.megabytes("scheduler"), "MB", 100),
        Check("param_store_peak_mb", peaks.megabytes("param-store"), "MB", 150, beside),
        Check("param_store_alone_mb", peaks.megabytes("param-store alone"), "MB"),
        Check("packer_mb", peaks.megabytes("param-store children"), "MB"),
        Check("upload_mb_per_s", num_bytes / MB / upload_s, "MB/s", None, "hashed, sent and packed"),
    ]
    conditions = {
        "upload_bytes": num_bytes,
        "vocabulary": VOCAB_SIZE,
        "samples": peaks.num_samples,
    }
    finish("memory", conditions, checks)


if __name__ == "__main__":
    main()

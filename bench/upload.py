"""An upload of a model in four files, over the slower of its disk and its SHA-256; and the same files again.

    python bench/upload.py [--quick]

`torchrelay up` runs, and a tenant uploads a model of 1 GB (300 MB with --quick) as `torchrelay upload` does: the time
is from the first byte that is hashed to the published model. Before it, each file is read from the disk without the
page cache, and its bytes are hashed in memory. Then the same tenant uploads the same files under another name.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.processes import MB
from bench.random_checkpoint import LlamaShape, write_checkpoint
from bench.report import Check, finish, parser_of, progress
from bench.serving.models import write_tokenizer
from tests.support.platform import running_platform
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import READ_BYTES, Folder
from torchrelay.cli.api.upload import ModelUpload

SHAPE = LlamaShape(vocab_size=15_360, num_layers=0, hidden=1024, intermediate=2816)
NUM_SHARDS = 4
OPTIONS = ("--kv-pool-mb", "64", "--threads", "1", "--quiet")


@dataclass(slots=True)
class Stages:
    """The times of the first and the last report of each stage of an upload; the files are the stage "send"."""

    spans_s: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, stage: str, done: int, total: int) -> None:
        now, name = time.monotonic(), "send" if "." in stage else stage
        self.spans_s[name] = (self.spans_s.get(name, (now, now))[0], now)

    @property
    def send_s(self) -> float:
        first, last = self.spans_s.get("send", (0.0, 0.0))
        return last - first

    def __str__(self) -> str:
        begin = min(first for first, _ in self.spans_s.values())
        return ", ".join(
            f"{name} {first - begin:.2f}-{last - begin:.2f} s" for name, (first, last) in self.spans_s.items()
        )


def disk_s(paths: list[Path]) -> float:
    """Seconds to read the files past the page cache."""
    buffer, begin = mmap.mmap(-1, 4 * READ_BYTES), time.monotonic()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            while os.readv(descriptor, [buffer]) == len(buffer):
                pass
        finally:
            os.close(descriptor)
    return time.monotonic() - begin


def hash_s(num_bytes: int) -> float:
    """Seconds to digest as many bytes of memory."""
    block, digest, begin = bytes(READ_BYTES), hashlib.sha256(), time.monotonic()
    for _ in range(num_bytes // READ_BYTES):
        digest.update(block)
    return time.monotonic() - begin


def upload_s(url: str, key: str, folder: Path, name: str) -> tuple[float, Stages]:
    """Seconds of an upload, and its stages."""
    stages, begin = Stages(), time.monotonic()
    with GatewayClient(url, key) as client:
        ModelUpload(client, Folder(folder), name, stages).run({})
    took_s = time.monotonic() - begin
    progress(f"{name}: {took_s:.2f} s; {stages}")
    return took_s, stages


def main() -> None:
    quick = parser_of(__doc__, "300 MB, under 50 s").parse_args().quick
    shape = SHAPE.grown_to((300 if quick else 1000) * MB)
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        root = Path(name)
        progress(f"making the checkpoint, {shape.num_bytes // MB} MB")
        folder = write_checkpoint(root / "checkpoint", shape, b"", NUM_SHARDS)
        write_tokenizer(folder, shape.vocab_size)
        os.sync()
        paths = sorted(folder.glob("*.safetensors"))
        num_bytes = sum(path.stat().st_size for path in paths)
        with running_platform(root / "home", ("--arena-mb", str(2 * shape.num_bytes // MB), *OPTIONS)) as platform:
            key = platform.tenant("acme")
            read_s, digest_s = disk_s(paths), hash_s(num_bytes)
            first_s, stages = upload_s(platform.http, key, folder, "first")
            again_s, _ = upload_s(platform.http, key, folder, "again")
    limit = f"disk {num_bytes / MB / read_s:.0f} MB/s, SHA-256 {num_bytes / MB / digest_s:.0f} MB/s"
    checks = [
        Check("upload_over_limit", max(read_s, digest_s) / first_s, "ratio", 0.7, limit, at_least=True),
        Check("again_s", again_s, "s", 0.5, "the same files, same tenant, another name"),
        Check("upload_mb_s", num_bytes / MB / first_s, "MB/s", None, "hash, send, check, pack, publish"),
        Check("send_mb_s", num_bytes / MB / stages.send_s, "MB/s", None, f"{NUM_SHARDS} files at once"),
    ]
    finish("upload", {"megabytes": num_bytes // MB, "files": len(paths)}, checks)


if __name__ == "__main__":
    main()

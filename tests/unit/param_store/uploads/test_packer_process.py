"""The packer as a process: its limits, its end, its verdicts as errors."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from tests.unit.param_store.model_folders import config_of, write_folder
from torchrelay.common.errors import Overloaded, Unavailable, UploadRefused
from torchrelay.param_store.uploads.packer_process import PackerQueue, PackJob, run_packer

MEMORY_BYTES = 256 << 20


def children() -> list[str]:
    return [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]


def environment_of(pid: str) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def num_children() -> int:
    return len(children())


async def test_the_packer_writes_pack_and_manifest(tmp_path: Path) -> None:
    job = PackJob(write_folder(tmp_path / "model"), tmp_path / "a.pack", 0, MEMORY_BYTES)
    progress = [line async for line in run_packer(job)]
    assert [line.stage for line in progress] == ["validate", "pack"]
    assert (tmp_path / "a.pack").stat().st_size == progress[-1].num_bytes_total
    assert (tmp_path / "a.manifest").exists()


async def test_leaving_early_kills_the_packer(tmp_path: Path) -> None:
    before = num_children()
    job = PackJob(write_folder(tmp_path / "model"), tmp_path / "a.pack", 0, MEMORY_BYTES)
    async with aclosing(run_packer(job)) as lines:
        await anext(lines)
        assert num_children() == before + 1
    assert num_children() == before


async def test_the_packer_has_none_of_the_stores_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what strangers upload."""
    for name in ("TORCHRELAY_NODE_KEY", "TORCHRELAY_NATS_URL", "AWS_SECRET_ACCESS_KEY", "SOME_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    before = set(children())
    job = PackJob(write_folder(tmp_path / "model"), tmp_path / "a.pack", 0, MEMORY_BYTES)
    async with aclosing(run_packer(job)) as lines:
        await anext(lines)
        (packer,) = set(children()) - before
        environment = environment_of(packer)
    assert b"OPENBLAS_NUM_THREADS=1" in environment and b"hunter2" not in environment


async def test_refusals_and_failures_are_told_apart(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    with pytest.raises(Unavailable, match=r"could not be packed: .*No such file"):
        async for _ in run_packer(PackJob(folder, tmp_path / "none/a.pack", 0, MEMORY_BYTES)):
            pass
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UploadRefused, match=r"tokenizer.json: it is missing") as refused:
        async for _ in run_packer(PackJob(folder, tmp_path / "a.pack", 0, MEMORY_BYTES)):
            pass
    assert refused.value.field == "tokenizer.json"


async def test_a_refusal_is_short_however_long_what_it_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", config_of())
    (folder / "config.json").write_text(json.dumps(config_of(hidden_act="x" * 1_000_000)))
    with pytest.raises(UploadRefused, match="hidden_act") as refused:
        async for _ in run_packer(PackJob(folder, tmp_path / "a.pack", 0, MEMORY_BYTES)):
            pass
    assert len(refused.value.message) < 1000


async def test_documents_that_take_too_much_memory_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_text("{" + ",".join(f'"{i}":[{"[]," * 8}0]' for i in range(100_000)) + "}")
    with pytest.raises(UploadRefused, match="more memory than the packer may use"):
        async for _ in run_packer(PackJob(folder, tmp_path / "a.pack", 0, 64 << 20)):
            pass


async def test_commits_take_turns_and_few_may_wait() -> None:
    turn = PackerQueue(max_waiting=1)
    async with turn.acquired():
        waiting = asyncio.ensure_future(turn.acquired().__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="too many commits are waiting for the packer: 1"):
            async with turn.acquired():
                pass
        assert not waiting.done()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    async with turn.acquired():
        pass

"""The packer as a process: its limits, its end, its verdicts as errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from tests.support.wait import HANG_S
from tests.unit.param_store.model_folders import config_of, write_folder
from torchrelay.common.errors import Overloaded, Unavailable, UploadRefused
from torchrelay.param_store.uploads import packer_process
from torchrelay.param_store.uploads.packer_process import CommitQueue, PackJob, PackProgress, Turn, run_packer
from torchrelay.param_store.uploads.repeated_progress import repeated

MEMORY_BYTES = 256 << 20
STALL_S = 600.0


def children() -> list[str]:
    return [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]


def environment_of(pid: str) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def packed(
    folder: Path, out: Path, memory_bytes: int = MEMORY_BYTES, stall_s: float = STALL_S
) -> list[PackProgress]:
    return [line async for line in run_packer(PackJob(folder, out, 0, memory_bytes), stall_s, Turn("one"))]


async def test_packer_writes_pack_and_manifest(tmp_path: Path) -> None:
    progress = await packed(write_folder(tmp_path / "model"), tmp_path / "a.pack")
    assert [line.stage for line in progress] == ["validate", "pack"]
    assert (tmp_path / "a.pack").stat().st_size == progress[-1].num_bytes_total
    assert (tmp_path / "a.manifest").exists()


async def test_packer_has_no_secrets_and_ends_with_its_iterator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packer reads untrusted uploads."""
    for name in ("TORCHRELAY_NODE_KEY", "TORCHRELAY_NATS_URL", "AWS_SECRET_ACCESS_KEY", "SOME_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    before = set(children())
    job = PackJob(write_folder(tmp_path / "model"), tmp_path / "a.pack", 0, MEMORY_BYTES)
    async with aclosing(run_packer(job, STALL_S, Turn("one"))) as lines:
        await anext(lines)
        (packer,) = set(children()) - before
        environment = environment_of(packer)
    assert b"OPENBLAS_NUM_THREADS=1" in environment and b"hunter2" not in environment
    assert set(children()) == before


async def test_packer_refusals_differ_from_failures(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    with pytest.raises(Unavailable, match=r"could not be packed: .*No such file"):
        await packed(folder, tmp_path / "none/a.pack")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UploadRefused, match=r"tokenizer.json: it is missing") as refused:
        await packed(folder, tmp_path / "a.pack")
    assert refused.value.field == "tokenizer.json"


async def test_refusal_length_limited(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", config_of())
    (folder / "config.json").write_text(json.dumps(config_of(hidden_act="x" * 1_000_000)))
    with pytest.raises(UploadRefused, match="hidden_act") as refused:
        await packed(folder, tmp_path / "a.pack")
    assert len(refused.value.message) < 1000


async def test_documents_beyond_memory_limit_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{" + ",".join(f'"{i}":[{"[]," * 8}0]' for i in range(100_000)) + "}")
    with pytest.raises(UploadRefused, match="more memory than the packer may use"):
        await packed(folder, tmp_path / "a.pack", 64 << 20)


class Commits:
    """Commits that hold their turns until they are told to end."""

    def __init__(self, queue: CommitQueue) -> None:
        self.queue = queue
        self.running: list[str] = []
        self.ending: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str) -> None:
        """``name`` is the tenant's and a digit."""
        self.ending[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self._run(name))
        await asyncio.sleep(0)  # it asks for its turn at once

    async def _run(self, name: str) -> None:
        async with self.queue.acquired(name[:-1]):
            self.running.append(name)
            await self.ending[name].wait()
            self.running.remove(name)

    async def end(self, name: str) -> None:
        self.ending[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)  # the next one begins


async def test_tenants_alternate_in_commit_queue() -> None:
    commits = Commits(CommitQueue(max_running=2, max_waiting=16))
    for name in ("large1", "large2", "large3", "small1", "other1"):
        await commits.begin(name)
    assert commits.running == ["large1", "small1"]
    await commits.end("small1")
    assert commits.running == ["large1", "other1"]
    await commits.end("other1")
    assert commits.running == ["large1"]  # one of each tenant
    await commits.end("large1")
    assert commits.running == ["large2"]
    commits.tasks["large3"].cancel()
    with suppress(asyncio.CancelledError):
        await commits.tasks["large3"]
    await commits.end("large2")
    assert commits.running == []


async def test_waiting_commits_limited_per_tenant() -> None:
    commits = Commits(CommitQueue(max_running=1, max_waiting=4))
    for name in ("one1", "one2", "two1", "three1", "four1"):
        await commits.begin(name)
    assert commits.running == ["one1"]
    for tenant in ("one", "five"):
        with pytest.raises(Overloaded, match="too many commits are waiting for the packer: 4"):
            async with commits.queue.acquired(tenant):
                pass
    await commits.end("one1")
    with pytest.raises(Overloaded, match="3, 1 of them this tenant's"):
        async with commits.queue.acquired("two" if "two1" not in commits.running else "three"):
            pass
    for name in ("one2", "two1", "three1", "four1"):
        commits.ending[name].set()
    await asyncio.gather(*commits.tasks.values())


async def test_turn_released_before_or_after_grant() -> None:
    queue = CommitQueue(max_running=1, max_waiting=0)
    held, waiting = Turn("one"), Turn("two")
    await queue.acquire(held)
    asked = asyncio.ensure_future(queue.acquire(waiting))
    await asyncio.sleep(0)
    asked.cancel()
    for turn in (waiting, held, Turn("never asked for")):
        queue.release(turn)
    last = Turn("three")
    async with asyncio.timeout(HANG_S):
        await queue.acquire(last)
    assert last.decided.is_set() and not waiting.decided.is_set()


async def test_stalled_packer_ended(tmp_path: Path) -> None:
    folder, before = write_folder(tmp_path / "model"), len(children())
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # as a file on a disk that does not answer
    with pytest.raises(Unavailable, match=r"made no progress for 0.5 s .* commit again"):
        await packed(folder, tmp_path / "a.pack", stall_s=0.5)
    assert len(children()) == before


async def test_unkillable_packer_keeps_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends no process that waits for a disk; here the kill is left out, as no such disk can be had."""
    monkeypatch.setattr(Process, "kill", lambda process: None)
    monkeypatch.setattr(packer_process, "_END_LIMIT_S", 0.1)
    folder, before, queue = write_folder(tmp_path / "model"), set(children()), CommitQueue(2, 16)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    job = PackJob(folder, tmp_path / "a.pack", 0, MEMORY_BYTES)
    try:
        with pytest.raises(Unavailable, match=r"made no progress for 0.5 s"):
            async with asyncio.timeout(HANG_S), queue.acquired("one") as place:  # its caller does not wait for it
                async for _ in run_packer(job, 0.5, place):
                    pass
        with pytest.raises(Unavailable, match="an earlier commit waits for this host's disk"):
            async with queue.acquired("one"):
                pass
        async with queue.acquired("two"):  # another tenant's has the other place
            pass
    finally:
        for pid in set(children()) - before:
            os.kill(int(pid), signal.SIGKILL)
    async with asyncio.timeout(HANG_S):
        assert place.packer_end is not None
        await place.packer_end
        async with queue.acquired("one"):
            pass


async def test_no_commit_waits_for_stuck_commit() -> None:
    queue, stuck, others = CommitQueue(2, 16), Turn("one"), Turn("two")
    await queue.acquire(stuck)
    await queue.acquire(others)
    waiting = [asyncio.ensure_future(queue.acquire(turn)) for turn in (Turn("one"), Turn("three"))]
    await asyncio.sleep(0)
    queue.give_up(stuck)
    async with asyncio.timeout(HANG_S):
        for turn in (waiting[0], queue.acquire(Turn("one"))):  # who waits already, and who comes
            with pytest.raises(Unavailable, match=r"an earlier commit waits for .* the remote store; commit again"):
                await turn
        queue.release(others)
        await waiting[1]  # another tenant's has the other place
    queue.release(stuck)


async def test_progress_repeated_while_unchanged() -> None:
    going_on = asyncio.Event()
    closed: list[str] = []

    async def steps() -> AsyncGenerator[str]:
        try:
            await going_on.wait()
            yield "a"
            yield "b"
            await asyncio.Event().wait()
        finally:
            closed.append("steps")

    seen: list[str] = []
    async with asyncio.timeout(HANG_S), aclosing(repeated(steps(), "first", 0.01)) as lines:
        async for line in lines:
            seen.append(line)
            if seen == ["first", "first"]:
                going_on.set()
            if seen[-2:] == ["b", "b"]:
                break
    assert list(dict.fromkeys(seen)) == ["first", "a", "b"]
    assert closed == ["steps"]

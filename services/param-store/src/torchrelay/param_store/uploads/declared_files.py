"""The files of an upload, checked before its first byte is accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from torchrelay.common.errors import QuotaExceeded, UploadRefused
from torchrelay.param_store.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    CONFIG,
    INDEX_FILE,
    MAX_FILE_BYTES,
    TOKENIZER,
    is_weights_file,
)
from torchrelay.param_store.packer.checkpoint import check_weight_files
from torchrelay.param_store.packer.core import PackRefused, quoted
from torchrelay.param_store.remote.keys import is_digest

MAX_FILES = 512
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt)", re.IGNORECASE)


class DeclaredFile(msgspec.Struct, frozen=True):
    """A file as the client declares it."""

    path: str
    num_bytes: int
    sha256: str


def is_weights(path: str) -> bool:
    """Whether the file becomes part of the pack; all other files are published unchanged."""
    return (is_weights_file(path) or path == INDEX_FILE) and path != ADAPTER_WEIGHTS


def check_declared(files: Sequence[DeclaredFile], quota_bytes: int, max_upload_bytes: int) -> None:
    """Raises ``UploadRefused`` with the first invalid file, or ``QuotaExceeded``."""
    if len(files) > MAX_FILES:
        raise UploadRefused(f"an upload may have at most {MAX_FILES} files, not {len(files)}", field="files")
    for file in files:
        _check_name(file.path)
        _check_numbers(file)
    names = [file.path for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UploadRefused(f"{twice}: it is declared twice", field=twice)
    is_adapter = ADAPTER_CONFIG in names
    for needed in ADAPTER_FILES if is_adapter else (CONFIG, TOKENIZER):
        if needed not in names:
            raise UploadRefused(f"{needed}: it is missing from the upload", field=needed)
    if is_adapter:
        if others := [name for name in names if name not in ADAPTER_FILES]:
            detail = f"an adapter consists of {' and '.join(ADAPTER_FILES)} alone"
            raise UploadRefused(f"{quoted(others[0])}: {detail}", field=others[0])
    else:
        try:
            check_weight_files(names)
        except PackRefused as refused:
            raise UploadRefused(str(refused), field=refused.file) from None
    total = sum(file.num_bytes for file in files)
    if total > max_upload_bytes:
        raise UploadRefused(f"the upload has {total:,} bytes; at most {max_upload_bytes:,} are accepted", field="files")
    if quota_bytes and total > quota_bytes:
        raise QuotaExceeded(f"the upload has {total:,} bytes and the tenant's quota has {quota_bytes:,} left")


def _check_name(path: str) -> None:
    if _PICKLED.fullmatch(path):
        detail = "pickled weights are never loaded, because they can run code; save the model as safetensors"
        raise UploadRefused(f"{quoted(path)}: {detail} (save_pretrained(..., safe_serialization=True))", field=path)
    if path not in MAX_FILE_BYTES and not is_weights_file(path):
        plain = path and not set(path) & set("/\\\0") and path not in (".", "..")
        detail = "it is not one of the files that a model consists of" if plain else "it is not a plain file name"
        raise UploadRefused(f"{quoted(path)}: {detail}", field=path if path.isprintable() else "files")


def _check_numbers(file: DeclaredFile) -> None:
    limit = MAX_FILE_BYTES.get(file.path)
    if limit is not None and file.num_bytes > limit:
        raise UploadRefused(
            f"{file.path}: it has {file.num_bytes:,} bytes; at most {limit:,} are read", field=file.path
        )
    if not is_digest(file.sha256):
        raise UploadRefused(f"{file.path}: sha256 must be 64 lower-case hex digits", field=file.path)

"""The weights of an upload: a single file, or shards with their index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torchrelay.param_store.model_files import INDEX_FILE, SINGLE_FILE
from torchrelay.param_store.packer.core import PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.documents import read_document
from torchrelay.param_store.packer.safetensors_header import read_tensors

_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """All tensors by name. Raises ``PackRefused`` if files, shards and index are inconsistent."""
    files = weight_files(sorted(path.name for path in folder.iterdir()))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_tensors(folder, file):
            if tensor.name in tensors:
                raise PackRefused(file, f"tensor {quoted(tensor.name)} is also in {tensors[tensor.name].file}")
            tensors[tensor.name] = tensor
    if (folder / INDEX_FILE).exists():
        _check_index(read_document(folder, INDEX_FILE), files, tensors)
    elif files != [SINGLE_FILE]:
        raise PackRefused(INDEX_FILE, "it is missing, although the weights are in shards")
    return tensors


def weight_files(names: list[str]) -> list[str]:
    """The files that hold weights, in order. Raises ``PackRefused`` for an incomplete set of shards."""
    shard_names = [(name, match) for name in names if (match := _SHARD.fullmatch(name))]
    if SINGLE_FILE in names:
        if shard_names:
            raise PackRefused(shard_names[0][0], f"the upload has shards and {SINGLE_FILE}; it must have either")
        return [SINGLE_FILE]
    if not shard_names:
        raise PackRefused(SINGLE_FILE, "it is missing from the upload, and there are no shards")
    count = int(shard_names[0][1][2])
    shards = {int(match[1]): name for name, match in shard_names if int(match[2]) == count}
    if len(shards) != len(shard_names):
        stray = next(name for name, match in shard_names if int(match[2]) != count)
        raise PackRefused(stray, f"other shards say that there are {count}")
    for number in range(1, count + 1):
        if number not in shards:
            raise PackRefused(f"model-{number:05}-of-{count:05}.safetensors", "this shard is missing from the upload")
    if len(shards) != count:
        raise PackRefused(shard_names[0][0], f"shards are numbered outside 1 to {count}")
    return [shards[number] for number in sorted(shards)]


def _check_index(index: dict[str, Any], files: list[str], tensors: dict[str, StoredTensor]) -> None:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise PackRefused(INDEX_FILE, "weight_map is not an object")
    for name, file in weight_map.items():
        if file not in files:
            raise PackRefused(
                INDEX_FILE, f"weight_map puts {quoted(name)} into {quoted(file)}, which is not in the upload"
            )
        if name not in tensors or tensors[name].file != file:
            raise PackRefused(INDEX_FILE, f"weight_map puts {quoted(name)} into {file}, which does not hold it")
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise PackRefused(INDEX_FILE, f"weight_map does not name {quoted(name)} of {tensor.file}")
    metadata = index.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(tensor.num_bytes for tensor in tensors.values())
    if claimed is not None and claimed != actual:
        raise PackRefused(INDEX_FILE, f"metadata.total_size is {quoted(claimed)} and the tensors take {actual} bytes")

"""The weights of an upload: the files that an index names, or a single file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.param_store.model_files import INDEX_FILE, SINGLE_FILE, is_weights_file
from torchrelay.param_store.packer.core import PackRefused, StoredTensor, listed, quoted
from torchrelay.param_store.packer.documents import read_document
from torchrelay.param_store.packer.safetensors_header import read_tensors

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors by name; ``file`` says which there are: the index or the single file."""

    tensors: dict[str, StoredTensor]
    file: str
    notes: tuple[str, ...] = ()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads what the index names. Without an index, or if no file that it names is in the upload, as after shards were
    merged, it reads the single file. Raises ``PackRefused`` if files and index are inconsistent.
    """
    present = {path.name for path in folder.iterdir() if is_weights_file(path.name)}
    check_weight_files([path.name for path in folder.iterdir()])
    if not (folder / INDEX_FILE).exists():
        return _single_file(folder)
    weight_map = read_document(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PackRefused(INDEX_FILE, "weight_map is not an object of tensors")
    named = {file for file in weight_map.values() if isinstance(file, str)}
    if SINGLE_FILE in present and not named & present:
        return _single_file(folder, f"{INDEX_FILE} was left out, because no file that it names is in the upload")
    unnamed = sorted(present - named)
    notes = (f"files that {INDEX_FILE} does not name were left out: {listed(unnamed)}",) if unnamed else ()
    return Checkpoint(_indexed_tensors(folder, weight_map, present), INDEX_FILE, notes)


def check_weight_files(names: list[str]) -> None:
    """Raises ``PackRefused`` if there is no index, and the single file is missing or other weights lie beside it."""
    if INDEX_FILE in names:
        return
    others = [name for name in names if is_weights_file(name) and name != SINGLE_FILE]
    if SINGLE_FILE in names and others:
        raise PackRefused(min(others), f"the upload has shards and {SINGLE_FILE}; it must have either")
    if others:
        raise PackRefused(INDEX_FILE, "it is missing, although the weights are in shards")
    if SINGLE_FILE not in names:
        raise PackRefused(SINGLE_FILE, "it is missing from the upload, and there are no shards")


def _single_file(folder: Path, *notes: str) -> Checkpoint:
    return Checkpoint({tensor.name: tensor for tensor in read_tensors(folder, SINGLE_FILE)}, SINGLE_FILE, notes)


def _indexed_tensors(folder: Path, weight_map: dict[str, Any], present: set[str]) -> dict[str, StoredTensor]:
    """The tensors that the index names, in the files that it names; what else these files hold is left out."""
    for name, file in weight_map.items():
        if not isinstance(file, str) or file not in present:
            place = f"weight_map puts {quoted(name)} into {quoted(file)}"
            raise PackRefused(INDEX_FILE, f"{place}, which is missing from the upload")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for tensor in read_tensors(folder, file):
            if weight_map.get(tensor.name) == file:
                tensors[tensor.name] = tensor
            elif tensor.name == _HEAD and _HEAD not in weight_map:  # without it, the model would only embed
                raise PackRefused(INDEX_FILE, f"weight_map does not name {_HEAD}, which {file} holds")
    for name, file in weight_map.items():
        if name not in tensors:
            raise PackRefused(INDEX_FILE, f"weight_map puts {quoted(name)} into {file}, which does not hold it")
    return tensors

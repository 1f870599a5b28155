"""The weights of an upload: a single file, or the files that an index names."""

from __future__ import annotations

from pathlib import Path

from torchrelay.param_store.model_files import INDEX_FILE, SINGLE_FILE, is_weights_file
from torchrelay.param_store.packer.core import PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.documents import read_document
from torchrelay.param_store.packer.safetensors_header import read_tensors

_HEAD = "lm_head.weight"


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """All tensors by name. Raises ``PackRefused`` if files and index are inconsistent."""
    check_weight_files([path.name for path in folder.iterdir()])
    if (folder / INDEX_FILE).exists():
        return _indexed_tensors(folder)
    return {tensor.name: tensor for tensor in read_tensors(folder, SINGLE_FILE)}


def check_weight_files(names: list[str]) -> None:
    """Raises ``PackRefused`` if the upload has neither a single file nor an index, or both."""
    others = [name for name in names if is_weights_file(name) and name != SINGLE_FILE]
    if SINGLE_FILE in names and others:
        raise PackRefused(min(others), f"the upload has shards and {SINGLE_FILE}; it must have either")
    if INDEX_FILE not in names and SINGLE_FILE not in names:
        if others:
            raise PackRefused(INDEX_FILE, "it is missing, although the weights are in shards")
        raise PackRefused(SINGLE_FILE, "it is missing from the upload, and there are no shards")


def _indexed_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors that the index names, in the files that it names; what else these files hold is left out."""
    weight_map = read_document(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PackRefused(INDEX_FILE, "weight_map is not an object of tensors")
    present = {path.name for path in folder.iterdir() if is_weights_file(path.name)}
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

"""The int8 form of a model folder: linear layers with weights in int8 and a scale for each output, as
compressed-tensors stores them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from torchrelay.cli.api.model_folder import ProgressCallback, model_paths
from torchrelay.cli.errors import CliError
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.modelspec.text_part import is_multimodal, text_tensor_name

_CONFIG, _INDEX, _WEIGHTS = "config.json", "model.safetensors.index.json", ".safetensors"
_BLOCK_VALUES: Final = 4 << 20  # that are widened to fp32 at a time
_NUMPY: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
_LARGEST: Final = 127  # the scale of an output is its largest weight over this


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a file; ``begin`` counts from the file's start."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    def fault(self, fault: str) -> CliError:
        return CliError(f"{self.path}: {self.name}: {fault}", "nothing was sent")


def write_int8_folder(source: Path, folder: Path, progress: ProgressCallback) -> None:
    """Writes the weights of ``source`` in int8 into ``folder``, file by file; other files become links.

    Raises ``CliError`` for a model whose weights cannot be in int8, with the file and the field or tensor.
    """
    config = json.loads((source / _CONFIG).read_bytes())
    names = _int8_names(source / _CONFIG, config)
    paths = model_paths(source)
    weights = [path for path in paths if path.suffix == _WEIGHTS]
    total, done = sum(path.stat().st_size for path in weights), 0
    files: dict[str, str] = {}  # of each scale
    for path in paths:
        target = folder / path.relative_to(source)
        if path in weights:
            tensors = _tensors(path)
            chosen = {tensor.name for tensor in tensors if _served_name(config, tensor.name) in names}
            files |= {_scale(name): path.name for name in chosen}
            for num_bytes in _write(target, tensors, chosen):
                done += num_bytes
                progress("quantize", done, total)
        elif path.name not in (_CONFIG, _INDEX) or path.parent != source:
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(path.resolve())
    (folder / _CONFIG).write_text(json.dumps(config | {"quantization_config": INT8_PER_OUTPUT}))
    if (source / _INDEX).exists():
        index = json.loads((source / _INDEX).read_bytes())
        (folder / _INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | files}))
    progress("quantize", total, total)


def _int8_names(path: Path, config: dict[str, Any]) -> set[str]:
    if config.get("quantization_config"):
        raise CliError(f"{path}: quantization_config: the weights are quantized already", "upload without --quantize")
    try:
        segments = tensors_by_segment(read_config(config | {"quantization_config": INT8_PER_OUTPUT}))
    except UnsupportedModel as error:
        raise CliError(f"{path}: {error}", f"the field is {error.field}; upload without --quantize") from error
    return {slot.name for slots in segments for slot in slots if slot.dtype == "I8"}


def _served_name(config: dict[str, Any], name: str) -> str | None:
    """The tensor's name in the model that is served; models of embeddings are saved without the first part of it."""
    if is_multimodal(config):
        return text_tensor_name(name)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _scale(name: str) -> str:
    return f"{name}_scale"


def _tensors(path: Path) -> list[_Tensor]:
    """The tensors of a file that `check_folder` has accepted, by offset."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors.append(_Tensor(path, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin))
    return sorted(tensors, key=lambda tensor: tensor.begin)


def _write(target: Path, tensors: list[_Tensor], chosen: set[str]) -> Iterator[int]:
    """Writes a safetensors file, with a scale after each chosen weight; yields the bytes of its source block by
    block.
    """
    entries: dict[str, Any] = {}
    end = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
        nonlocal end
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + num_bytes)}
        end += num_bytes

    for tensor in tensors:
        if tensor.name not in chosen:
            add(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes)
            continue
        if tensor.dtype not in _NUMPY or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise tensor.fault(f"a weight of {tensor.dtype} and shape {list(tensor.shape)} cannot be quantized")
        if tensor.num_bytes != tensor.shape[0] * tensor.shape[1] * _NUMPY[tensor.dtype].itemsize:
            raise tensor.fault(f"its shape and dtype do not give its {tensor.num_bytes:,} bytes")
        add(tensor.name, "I8", tensor.shape, tensor.shape[0] * tensor.shape[1])
        add(_scale(tensor.name), "F32", (tensor.shape[0], 1), 4 * tensor.shape[0])
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            yield from _quantized(out, tensor) if tensor.name in chosen else _copied(out, tensor)


def _copied(out: BinaryIO, tensor: _Tensor) -> Iterator[int]:
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        num_left = tensor.num_bytes
        while num_left and (block := file.read(min(_BLOCK_VALUES, num_left))):
            out.write(block)
            num_left -= len(block)
            yield len(block)


def _quantized(out: BinaryIO, tensor: _Tensor) -> Iterator[int]:
    num_rows, row_values = tensor.shape
    scales = np.empty(num_rows, "<f4")
    rows = np.memmap(tensor.path, _NUMPY[tensor.dtype], "r", tensor.begin, tensor.shape)
    group = max(_BLOCK_VALUES // row_values, 1)
    for begin in range(0, num_rows, group):
        block = rows[begin : begin + group]
        numbers, scales[begin : begin + group] = int8_of(_widened(block, tensor.dtype))
        if not np.isfinite(scales[begin : begin + group]).all():
            raise tensor.fault("some of its values are not finite")
        out.write(numbers.tobytes())
        yield block.nbytes
    out.write(scales.tobytes())


def int8_of(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """[out, in] weights as int8 numbers and a scale for each output. A scale is not finite if one of its weights is
    not.
    """
    scales = np.abs(values).max(axis=1) / np.float32(_LARGEST)
    scales[scales == 0] = 1  # of an output whose weights are all zero
    with np.errstate(invalid="ignore"):  # the caller refuses weights that are not finite
        numbers = np.rint(values / scales[:, None]).clip(-_LARGEST, _LARGEST).astype(np.int8)
    return numbers, scales


def _widened(block: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (block.astype(np.uint32) << 16).view(np.float32)
    return block.astype(np.float32)

"""Cheap checks of a model before gigabytes are hashed and sent; the param-store checks everything."""

from __future__ import annotations

import json
import re

from torchrelay.cli.api.model_files import adapter_paths, model_paths
from torchrelay.cli.api.model_source import ModelSource
from torchrelay.cli.errors import CliError
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.opaque import VLLM, check_known, read_opaque
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # the gateway's rule
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 8 << 20  # the param-store reads no more
_LFS_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"


def is_model_name(name: str) -> bool:
    """Whether the gateway accepts this name (without its tenant)."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """``name`` is MODEL or TENANT/MODEL. Raises ``CliError``."""
    tenant, slash, model = name.rpartition("/")
    for part in (tenant, model) if slash else (model,):
        if not is_model_name(part):
            raise CliError(
                f"{part!r} is not a valid name: 1 to 64 of a-z, 0-9, '.', '_' and '-', the first a letter or digit",
                "choose another with --name",
            )


def check_model(source: ModelSource, *, is_adapter: bool = False, to_int8: bool = False, engine: str = "") -> str:
    """Reads the config and each header, but no weights; returns the engine that the weights need, "" if any will do.
    ``to_int8``: they are to be quantized. ``engine``: the one that the user has chosen, if any.

    Raises ``CliError``.
    """
    paths = adapter_paths(source) if is_adapter else model_paths(source)
    needed = "" if is_adapter else _needed_engine(source, to_int8, engine.partition(":")[0])
    for path in paths:
        if path.endswith(".safetensors") and source.sha256(path) is None:  # else it is as complete as on the hub
            _check_header(source, path)
    return needed


def _needed_engine(source: ModelSource, to_int8: bool, engine: str) -> str:
    path = f"{source}/config.json"
    try:
        config = json.loads(source.read("config.json"))
    except ValueError as error:
        raise CliError(f"{path} is not valid JSON: {error}", "copy it again from its source") from error
    if not isinstance(config, dict):
        raise CliError(f"{path} is not a JSON object", "copy it again from its source")
    if to_int8 and config.get("quantization_config"):
        raise CliError(f"{path}: quantization_config: the weights are quantized already", "upload without --quantize")
    if to_int8:
        config["quantization_config"] = INT8_PER_OUTPUT
    try:
        return read_config(config).needed_engine
    except UnsupportedModel as error:
        refusal = error
    if to_int8 and refusal.field == "quantization_config":
        raise CliError(f"{path}: {config['architectures'][0]} cannot be quantized here", "upload without --quantize")
    if not to_int8 and _may_be_for_vllm(engine, refusal.field):
        try:
            check_known(config)
            read_opaque(config)
            return VLLM
        except UnsupportedModel as error:
            refusal = error
    raise CliError(f"{path}: {refusal}", f"the field is {refusal.field}; nothing was sent")


def _may_be_for_vllm(engine: str, refused_field: str) -> bool:
    """Whether vLLM is asked for what Torchrelay's engine refuses."""
    return engine == VLLM or (engine in ("", "auto") and refused_field == "architectures")


def _check_header(source: ModelSource, path: str) -> None:
    """A safetensors file begins with the length of its header (little endian), which says where each tensor ends."""
    prefix, num_left = source.read(path, _LENGTH_BYTES), source.sizes[path] - _LENGTH_BYTES
    length = int.from_bytes(prefix, "little")
    header = source.read(path, _LENGTH_BYTES + min(length, _MAX_HEADER_BYTES))[_LENGTH_BYTES:]
    if (prefix + header).startswith(_LFS_POINTER):
        raise CliError(
            f"{source}/{path} is a Git-LFS pointer, not the weights", f"fetch them: git -C {source} lfs pull"
        )
    if not prefix:
        fault = "it is empty"
    elif len(prefix) < _LENGTH_BYTES:
        fault = f"it ends within the length of its header, which takes {_LENGTH_BYTES} bytes, after {len(prefix)}"
    elif length > num_left:
        fault = f"its header claims {length:,} bytes, but {num_left:,} follow the length"
    elif (num_weights := _weight_bytes(header)) is None:
        fault = "its header is not that of a safetensors file"
    elif num_weights > num_left - length:
        fault = f"its tensors take {num_weights:,} bytes, but {num_left - length:,} follow the header"
    else:
        return
    raise CliError(f"{source}/{path} is not a complete safetensors file: {fault}", "download it again")


def _weight_bytes(header: bytes) -> int | None:
    """The end of the last tensor, counted from the header's end; None if this is no header."""
    try:
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != _METADATA}
        return max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None

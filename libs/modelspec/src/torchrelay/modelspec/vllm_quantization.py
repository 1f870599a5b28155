"""Quantized weights that vLLM computes with: AWQ, GPTQ, FP8, and the formats of compressed-tensors.

Torchrelay stores them as they are. From quantization_config follow the tensors of each linear layer, with shapes and
dtypes, so that no tensor reaches vLLM's kernels that does not fit the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final

from torchrelay.modelspec.errors import UnsupportedModel, shown

FIELD: Final = "quantization_config"
MAX_LISTED: Final = 4096  # layers that are named as not quantized
_MAX_GROUP: Final = 1 << 20
# vLLM matches names with these patterns, which come from tenants: letters, escaped dots and few ".*" end soon.
_PATTERN: Final = re.compile(r"re:\^?(?:[A-Za-z0-9_\-]|\\\.|\.\*?|\\d){1,200}\$?")
_MAX_WILDCARDS, _MAX_PATTERNS = 3, 64
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,200}")


class Values(Enum):
    """The numbers that a tensor may have."""

    WEIGHTS = auto()  # any; finite where they can be otherwise
    SCALES = auto()  # finite and above zero
    GROUPS = auto()  # of each input the number of its group, in order
    SHAPE = auto()  # the shape of the whole weight


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a quantized layer; ``ending`` replaces "weight" in the weight's name. ``dtype`` "": that of scales,
    which is any of a model's. A scale of a whole tensor may be stored without a dimension.
    """

    ending: str
    dtype: str
    shape: tuple[int, ...]
    values: Values = Values.WEIGHTS


@dataclass(frozen=True, slots=True)
class VllmQuantization:
    """``document`` is the quantization_config, with nothing but what was checked."""

    method: str
    stored: str  # what the weights are, as shown to users
    group_size: int  # inputs that share a scale; 0: all
    document: Mapping[str, Any] = field(hash=False)
    _parts: Callable[[VllmQuantization, int, int], tuple[Part, ...]] = field(hash=False, compare=False)

    def parts(self, num_out: int, num_in: int) -> tuple[Part, ...]:
        """The tensors of a weight [out, in]. Raises ``UnsupportedModel`` if its size does not fit."""
        return self._parts(self, num_out, num_in)

    def num_groups(self, num_in: int) -> int:
        if not self.group_size:
            return 1
        return _whole(num_in, self.group_size, "group_size")


def vllm_quantization(quantization: Mapping[str, Any]) -> VllmQuantization:
    """Reads a quantization_config, except of compressed-tensors. Raises ``UnsupportedModel`` for what is not known
    to be safe for vLLM.
    """
    method = quantization.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        known = ", ".join((*_READERS, COMPRESSED))
        raise _refused("quant_method", f"quant_method {shown(method)} is not supported; supported are {known}")
    return reader(quantization)


# AWQ and GPTQ


def _awq(config: Mapping[str, Any]) -> VllmQuantization:
    _require(config, "bits", 4)
    _require(config, "zero_point", True)
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise _refused("version", f"version {shown(config['version'])} is not supported; supported is 'gemm'")
    group = _group_size(config)
    document = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    document |= {"modules_to_not_convert": layer_names(config, "modules_to_not_convert")}
    return VllmQuantization("awq", "I4", group, document, _awq_parts)


def _awq_parts(of: VllmQuantization, num_out: int, num_in: int) -> tuple[Part, ...]:
    words, groups = _whole(num_out, 8, "bits"), of.num_groups(num_in)
    return (
        Part("qweight", "I32", (num_in, words)),
        Part("qzeros", "I32", (groups, words)),
        Part("scales", "", (groups, num_out), Values.SCALES),
    )


def _gptq(config: Mapping[str, Any]) -> VllmQuantization:
    bits = _one_of(config, "bits", (4, 8))
    _require(config, "desc_act", False)  # vLLM's kernels for a CPU ignore the order of the inputs
    _require(config, "sym", True)
    _one_of(config, "checkpoint_format", (None, "gptq"))  # vLLM reads gptq_v2 as this, with each zero point off by one
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if config.get(key):
            raise _refused(key, f"{key} is not supported")
    group = _group_size(config)
    document = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": True}
    document |= {"lm_head": _flag(config, "lm_head")}
    return VllmQuantization("gptq", f"I{bits}", group, document, _gptq_parts)


def _gptq_parts(of: VllmQuantization, num_out: int, num_in: int) -> tuple[Part, ...]:
    per_word, groups = 32 // int(of.document["bits"]), of.num_groups(num_in)
    return (
        Part("qweight", "I32", (_whole(num_in, per_word, "bits"), num_out)),
        Part("qzeros", "I32", (groups, _whole(num_out, per_word, "bits"))),
        Part("scales", "", (groups, num_out), Values.SCALES),
        Part("g_idx", "I32", (num_in,), Values.GROUPS),
    )


# FP8


def _fp8(config: Mapping[str, Any]) -> VllmQuantization:
    scheme = _one_of(config, "activation_scheme", ("dynamic", "static"))
    document: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": scheme}
    if (block := config.get("weight_block_size")) is not None:
        document["weight_block_size"] = _block(block, "weight_block_size")
        if scheme == "static":
            raise _refused("activation_scheme", "weights in blocks need activation_scheme 'dynamic'")
    for key in ("ignored_layers", "modules_to_not_convert"):
        document[key] = layer_names(config, key)
    return VllmQuantization("fp8", "F8_E4M3", 0, document, _fp8_parts)


def _fp8_parts(of: VllmQuantization, num_out: int, num_in: int) -> tuple[Part, ...]:
    weight = Part("weight", "F8_E4M3", (num_out, num_in))
    if block := of.document.get("weight_block_size"):
        shape = -(-num_out // block[0]), -(-num_in // block[1])
        return weight, Part("weight_scale_inv", "", shape, Values.SCALES)
    scale = Part("weight_scale", "", (1,), Values.SCALES)
    if of.document["activation_scheme"] == "static":
        return weight, scale, replace(scale, ending="input_scale")
    return weight, scale


# compressed-tensors

COMPRESSED: Final = "compressed-tensors"
_FORMATS: Final = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}
# What would change the weights or their meaning, and its values that do not.
_ABSENT: Final[Mapping[str, tuple[Any, ...]]] = {
    "sparsity_config": (None, {}, {"format": "dense"}),
    "transform_config": (None, {}),
    "kv_cache_scheme": (None,),
}


@dataclass(frozen=True, slots=True)
class CompressedLayers:
    """The parts of a quantization_config of compressed-tensors, in which all linear layers are treated alike.

    ``weights``, ``activations`` and ``config`` are not checked. ``place`` is the field of the group.
    """

    config: Mapping[str, Any]
    stored: str
    place: str
    weights: Any
    activations: Any


def compressed_layers(config: Mapping[str, Any]) -> CompressedLayers:
    """Parses a quantization_config of compressed-tensors. Raises ``UnsupportedModel`` for what no engine computes."""
    stored = _one_of(config, "format", tuple(_FORMATS))
    for key, harmless in _ABSENT.items():
        if config.get(key) not in harmless:
            raise _refused(key, f"{key} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused("config_groups", "it must be an object with one group, as all linear layers are treated alike")
    ((name, group),) = groups.items()
    place = f"config_groups.{name}"
    group = _object(group, place)
    _require(group, "targets", ["Linear"], place)
    _require(group, "output_activations", None, place)
    if "format" in group:
        _require(group, "format", stored, place)
    return CompressedLayers(config, stored, place, group.get("weights"), group.get("input_activations"))


def vllm_compressed(layers: CompressedLayers) -> VllmQuantization:
    """The quantization of parsed layers. Raises ``UnsupportedModel`` for what is not known to be safe for vLLM."""
    config, stored = layers.config, layers.stored
    weights = _weights(layers.weights, stored, f"{layers.place}.weights")
    activations = _activations(layers.activations, stored, f"{layers.place}.input_activations")
    checked = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    document = {
        "quant_method": COMPRESSED,
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": checked | {"output_activations": None}},
        "ignore": layer_names(config, "ignore", patterns=True),
    }
    kind = "F8_E4M3" if weights["type"] == "float" else f"I{weights['num_bits']}"
    return VllmQuantization(COMPRESSED, kind, weights["group_size"] or 0, document, _compressed_parts)


def _weights(weights: Any, stored: str, place: str) -> dict[str, Any]:
    weights = _object(weights, place)
    _require(weights, "type", _FORMATS[stored], place)
    bits = _one_of(weights, "num_bits", (4, 8) if stored == "pack-quantized" else (8,), place)
    _require(weights, "symmetric", True, place)
    if weights.get("dynamic"):
        raise _refused(f"{place}.dynamic", "dynamic weights are not supported")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise _refused(f"{place}.actorder", f"actorder {shown(weights['actorder'])} is not supported")
    strategies = {
        "pack-quantized": ("group", "channel"),
        "int-quantized": ("channel", "tensor"),
        "float-quantized": ("channel", "tensor", "block"),
    }
    strategy = _one_of(weights, "strategy", strategies[stored], place)
    group, block = None, None
    if strategy == "group":
        group = _group_size(weights, place)
        if not group:
            raise _refused(f"{place}.group_size", "it must be a positive whole number")
    elif strategy == "block":
        block = _block(weights.get("block_structure"), f"{place}.block_structure")
    common = {"num_bits": bits, "type": _FORMATS[stored], "symmetric": True, "dynamic": False, "strategy": strategy}
    return common | {"group_size": group, "block_structure": block}


def _activations(activations: Any, stored: str, place: str) -> dict[str, Any] | None:
    if activations is None:
        return None
    if stored == "pack-quantized":
        raise _refused(place, "weights that are packed have activations of 16 bits")
    activations = _object(activations, place)
    _require(activations, "type", _FORMATS[stored], place)
    _require(activations, "num_bits", 8, place)
    _require(activations, "symmetric", True, place)
    dynamic = activations.get("dynamic")
    strategies = ("token", "group") if dynamic is True else ("tensor",)
    if not isinstance(dynamic, bool):
        raise _refused(f"{place}.dynamic", f"dynamic {shown(dynamic)} is not supported")
    strategy = _one_of(activations, "strategy", strategies, place)
    group = _group_size(activations, place) if strategy == "group" else None
    common = {"num_bits": 8, "type": _FORMATS[stored], "symmetric": True, "dynamic": dynamic}
    return common | {"strategy": strategy, "group_size": group}


def _compressed_parts(of: VllmQuantization, num_out: int, num_in: int) -> tuple[Part, ...]:
    group = of.document["config_groups"]["group_0"]
    weights, activations = group["weights"], group["input_activations"]
    if of.document["format"] == "pack-quantized":
        words = _whole(num_in, 32 // weights["num_bits"], "config_groups")
        return (
            Part("weight_packed", "I32", (num_out, words)),
            Part("weight_scale", "", (num_out, of.num_groups(num_in)), Values.SCALES),
            Part("weight_shape", "I64", (2,), Values.SHAPE),
        )
    shape: tuple[int, ...] = (1,)
    if weights["strategy"] == "channel":
        shape = (num_out, 1)
    elif weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        shape = -(-num_out // rows), -(-num_in // columns)
    dtype = "F8_E4M3" if weights["type"] == "float" else "I8"
    parts = Part("weight", dtype, (num_out, num_in)), Part("weight_scale", "", shape, Values.SCALES)
    if activations is not None and not activations["dynamic"]:
        return *parts, Part("input_scale", "", (1,), Values.SCALES)
    return parts


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], VllmQuantization]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
}


# Fields


def _refused(key: str, message: str) -> UnsupportedModel:
    return UnsupportedModel(message, f"{FIELD}.{key}")


def _object(part: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise _refused(place, "it must be an object")
    return part


def _require(part: Mapping[str, Any], key: str, supported: Any, place: str = "") -> None:
    value = part.get(key)
    if value != supported or type(value) is not type(supported):
        message = f"{key} {shown(value)} is not supported; supported is {shown(supported)}"
        raise _refused(f"{place}.{key}" if place else key, message)


def _one_of(part: Mapping[str, Any], key: str, supported: tuple[Any, ...], place: str = "") -> Any:
    value = part.get(key)
    for each in supported:
        if value == each and type(value) is type(each):
            return each
    known = " and ".join(map(shown, supported))
    message = f"{key} {shown(value)} is not supported; supported are {known}"
    raise _refused(f"{place}.{key}" if place else key, message)


def _flag(part: Mapping[str, Any], key: str) -> bool:
    value = part.get(key, False)
    if not isinstance(value, bool):
        raise _refused(key, f"{key} must be true or false, not {shown(value)}")
    return value


def _group_size(part: Mapping[str, Any], place: str = "") -> int:
    """Inputs that share a scale; 0, which configs write as -1: all."""
    value = part.get("group_size")
    if type(value) is not int or not (value == -1 or 0 < value <= _MAX_GROUP):
        where = f"{place}.group_size" if place else "group_size"
        raise _refused(where, f"group_size must be -1 or a positive whole number, not {shown(value)}")
    return max(value, 0)


def _block(value: Any, place: str) -> list[int]:
    is_block = isinstance(value, list) and len(value) == 2
    if not is_block or not all(type(each) is int and 0 < each <= _MAX_GROUP for each in value):
        raise _refused(place, f"it must be two positive whole numbers, not {shown(value)}")
    return list(value)


def layer_names(part: Mapping[str, Any], key: str, *, patterns: bool = False) -> list[str]:
    """Names of layers that are not quantized; with ``patterns`` some may be expressions after "re:"."""
    names = part.get(key) or []
    if not isinstance(names, list) or len(names) > MAX_LISTED:
        raise _refused(key, f"it must be a list of at most {MAX_LISTED} names")
    num_patterns = 0
    for name in names:
        if isinstance(name, str) and _NAME.fullmatch(name):
            continue
        num_patterns += 1
        is_safe = patterns and isinstance(name, str) and _PATTERN.fullmatch(name) is not None
        if not is_safe or num_patterns > _MAX_PATTERNS or name.count(".*") > _MAX_WILDCARDS:
            raise _refused(key, f"{shown(name)} is neither a name nor a simple pattern")
    return list(names)


def _whole(number: int, divisor: int, key: str) -> int:
    if number % divisor:
        raise _refused(key, f"a layer of {number:,} does not divide into parts of {divisor:,}")
    return number // divisor

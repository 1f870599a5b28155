"""LoRA adapters as PEFT saves them: adapter_config.json, parsed strictly, and the matrices that its tensors change.

An adapter adds ``scaling * B(A(x))`` to the output of a projection, with A [rank, in] and B [out, rank]
(https://arxiv.org/abs/2106.09685). ``scaling`` is alpha / rank, or alpha / sqrt(rank) with ``use_rslora``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeAlias

from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.errors import UnsupportedModel, shown
from torchrelay.modelspec.tensor_order import tensors_by_segment

MAX_RANK: Final = 512
PROJECTIONS: Final = ("qkv", "o", "gate_up", "down")  # groups of tensors that an adapter may change
_PREFIX: Final = "base_model.model."
_ENDS: Final = (".lora_A.weight", ".lora_B.weight")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.]{1,200}")
# Initialisations that leave the weights of the base as they are.
_INITIALISATIONS: Final = (True, False, None, "gaussian", "orthogonal", "eva")
_READ: Final = frozenset(
    {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"}
    | {"exclude_modules", "layers_to_transform", "init_lora_weights", "bias"}
)
_Pattern: TypeAlias = Mapping[str, tuple[int, Any]]  # place and value by the name of a module; after ^ the whole name
_INERT: Final = frozenset(  # they tell how it was trained
    {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version"}
    | {"megatron_core", "loftq_config", "eva_config", "qalora_group_size", "layers_pattern"}
)


class UnsupportedTensor(UnsupportedModel):
    """A tensor of the adapter is missing, or is not one of its projections'; ``field`` is its name."""


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A projection that an adapter changes. ``begin`` is its first row in the fused projection of its group."""

    layer: int
    group: str  # one of PROJECTIONS
    module: str
    begin: int
    num_out: int
    num_in: int
    rank: int
    scaling: float

    @property
    def tensors(self) -> dict[str, tuple[int, int]]:
        """The names of A and B, in this order, and their shapes."""
        name = _PREFIX + self.module
        return {
            name + _ENDS[0]: (self.rank, self.num_in),
            name + _ENDS[1]: (self.num_out, self.rank),
        }


def adapted_matrices(config: ModelConfig, document: Mapping[str, Any], names: set[str]) -> tuple[AdaptedMatrix, ...]:
    """The projections of the base model ``config`` that an adapter changes, by layer.

    ``document`` is adapter_config.json, ``names`` are those of the tensors; the caller compares their shapes. Raises
    ``UnsupportedModel`` with a field of the document, or ``UnsupportedTensor``.
    """
    _check_document(document)
    targets = _targets(document)
    layers = _layers_to_transform(document)
    is_listed = isinstance(document["target_modules"], list) and not document.get("exclude_modules")
    matrices: list[AdaptedMatrix] = []
    known: set[str] = set()
    for matrix in _matrices(config, document):
        is_target = targets is None or any(name in targets for name in _names(matrix.module))
        if not is_target or (layers is not None and matrix.layer not in layers):
            continue
        present = [name for name in matrix.tensors if name in names]
        if len(present) == 1 or (is_listed and not present):
            missing = next(name for name in matrix.tensors if name not in names)
            raise UnsupportedTensor("it is missing, although target_modules names its projection", missing)
        if present:
            matrices.append(matrix)
            known |= matrix.tensors.keys()
    if surplus := sorted(names - known):
        raise UnsupportedTensor("it belongs to no projection that the config adapts in this base model", surplus[0])
    if not matrices:
        raise UnsupportedModel("the file has no tensors of an adapter", "target_modules")
    return tuple(matrices)


def opaque_matrices(
    document: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[int, dict[str, tuple[int, int]]]]:
    """The rank of each projection that the tensors of an adapter change, and the names of A and B with their shapes.

    Only the engine of the base model knows whether it has these projections. Raises as ``adapted_matrices``.
    """
    _check_document(document)
    ranks, default_rank = _pattern(document, "rank_pattern"), _rank(document.get("r"), "r")
    modules = {name.removesuffix(end) for name in shapes for end in _ENDS if name.endswith(end)}
    known = {module + end for module in modules for end in _ENDS}
    if surplus := sorted(shapes.keys() - known):
        raise UnsupportedTensor("it is neither A nor B of a projection", surplus[0])
    if not modules:
        raise UnsupportedModel("the file has no tensors of an adapter", "target_modules")
    for module in sorted(modules):
        name_a, name_b = module + _ENDS[0], module + _ENDS[1]
        for name in (name_a, name_b):
            if name not in shapes or not module.startswith(_PREFIX):
                raise UnsupportedTensor(f"names must be {_PREFIX}MODULE{_ENDS[0]} and {_ENDS[1]}, in pairs", name)
            if len(shapes[name]) != 2:
                raise UnsupportedTensor("it is not a matrix", name)
        rank = _rank(_of_pattern(ranks, module.removeprefix(_PREFIX), default_rank), "rank_pattern")
        yield rank, {name_a: (rank, shapes[name_a][1]), name_b: (shapes[name_b][0], rank)}


def _check_document(document: Mapping[str, Any]) -> None:
    def require(field: str, allowed: tuple[Any, ...]) -> None:
        value = document.get(field)
        if not any(value is each or (isinstance(each, str) and value == each) for each in allowed):
            raise UnsupportedModel(f"{shown(value)} is not supported", field)

    require("peft_type", ("LORA",))
    require("task_type", ("CAUSAL_LM", None))
    require("bias", ("none", None))
    require("init_lora_weights", _INITIALISATIONS)
    require("use_rslora", (True, False, None))
    for field, value in document.items():
        if field not in _READ | _INERT and value:  # use_dora, lora_bias, modules_to_save, alora_invocation_tokens ...
            raise UnsupportedModel(f"{str(value)[:100]} is not supported", str(field)[:100])


def _targets(document: Mapping[str, Any]) -> frozenset[str] | None:
    """The listed modules; None for a pattern: the tensors then tell which modules match it."""
    targets = document.get("target_modules")
    if isinstance(targets, str) and targets:
        return None
    if not isinstance(targets, list) or not targets:
        raise UnsupportedModel("it is neither a list of modules nor a pattern", "target_modules")
    supported = (
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
    )
    for target in targets:
        if not isinstance(target, str) or target.rpartition(".")[2] not in supported:
            raise UnsupportedModel(
                f"the module {str(target)[:100]!r} is not supported; adapters may change {', '.join(supported)}",
                "target_modules",
            )
    return frozenset(targets)


def _layers_to_transform(document: Mapping[str, Any]) -> set[int] | None:
    value = document.get("layers_to_transform")
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int for layer in layers):
        raise UnsupportedModel("it is not a list of layers", "layers_to_transform")
    return set(layers)


def _matrices(config: ModelConfig, document: Mapping[str, Any]) -> Iterator[AdaptedMatrix]:
    """All projections that an adapter may change. A mixture of experts has them in its attention only."""
    ranks, alphas = _pattern(document, "rank_pattern"), _pattern(document, "alpha_pattern")
    default_rank, default_alpha = _rank(document.get("r"), "r"), _alpha(document.get("lora_alpha"), "lora_alpha")
    groups = PROJECTIONS[:2] if config.experts is not None else PROJECTIONS
    if config.encoder is not None:
        raise UnsupportedModel("the base model is an encoder, which takes no adapters", "base_model_name_or_path")
    for segment, tensors in enumerate(tensors_by_segment(config)):
        for group, parts in groupby(tensors, key=lambda tensor: tensor.group):
            begin = 0
            for part in parts if group in groups else ():
                module, (num_out, num_in) = part.name.removesuffix(".weight"), part.shape
                rank = _rank(_of_pattern(ranks, module, default_rank), "rank_pattern")
                alpha = _alpha(_of_pattern(alphas, module, default_alpha), "alpha_pattern")
                scaling = alpha / (math.sqrt(rank) if document.get("use_rslora") else rank)
                yield AdaptedMatrix(segment - 1, group, module, begin, num_out, num_in, rank, scaling)
                begin += num_out


def _pattern(document: Mapping[str, Any], field: str) -> _Pattern:
    pattern = document.get(field) or {}
    if not isinstance(pattern, dict):
        raise UnsupportedModel("it is not an object", field)
    for name in pattern:
        if not _PLAIN_NAME.fullmatch(name.removeprefix("^")):
            raise UnsupportedModel(f"{shown(name[:100])} is not the plain name of a module", field)
    return {name: (place, value) for place, (name, value) in enumerate(pattern.items())}


def _of_pattern(pattern: _Pattern, module: str, default: Any) -> Any:
    """The value of the first name in the pattern that is one of the module's."""
    entries = [pattern[name] for name in (f"^{module}", *_names(module)) if name in pattern]
    return min(entries, key=lambda each: each[0])[1] if entries else default


def _names(module: str) -> Iterator[str]:
    """The names of a module in an adapter's config: its own, and the ends of this after a dot."""
    while module:
        yield module
        module = module.partition(".")[2]


def _rank(value: Any, field: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise UnsupportedModel(f"the rank {str(value)[:40]} is not a whole number from 1 to {MAX_RANK}", field)
    return value


def _alpha(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e6:
        raise UnsupportedModel(f"{str(value)[:40]} is not a number of at most 1,000,000", field)
    return float(value)

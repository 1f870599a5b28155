"""The library built from ``kernels.c``, if it was built and this CPU can run it.

The package's installation builds it, where there is gcc, once per instruction set level: v3 is AVX2, v4 AVX-512.
Callers pass contiguous tensors of one dtype.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ARGUMENTS: Final[dict[str, list[Any]]] = {
    "linear": [c_int, c_void_p, c_long, c_long, c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_void_p],
    "norm": [c_int, c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int, c_void_p, c_void_p],
    "place_heads": [c_int, c_void_p, c_void_p, c_float, c_int, *[c_void_p] * 4, c_long, c_void_p, *[c_long] * 4],
    "gate": [c_int, c_void_p, c_long, c_long, c_int, c_void_p],
    "attend": [c_int, c_void_p, c_void_p, c_long, *[c_void_p] * 3, *[c_long] * 4, c_float, c_float, c_void_p],
    "adapt": [c_int, c_void_p, c_long, c_long, c_void_p, c_long, c_long, c_void_p, c_long],
    "layers": [c_void_p, c_void_p, c_long, c_long, c_void_p, c_void_p],
}


@dataclass(frozen=True, slots=True)
class IsaLevel:
    """An instruction set.

    With more than ``linear_rows`` rows it is quicker to widen a block of weights once for all.
    """

    name: str
    needs: tuple[str, ...]  # as torch.cpu.get_capabilities names them
    linear_rows: int

    @property
    def file(self) -> Path:
        return Path(__file__).with_name(f"_kernels_{self.name}{EXTENSION_SUFFIXES[0]}")

    @property
    def runs_here(self) -> bool:
        """Whether it was built and this CPU has its instructions."""
        capabilities = torch.cpu.get_capabilities()
        return self.file.exists() and all(capabilities.get(name) for name in self.needs)


_V3: Final = ("avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt")
_V4: Final = ("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl")
LEVELS: Final = (IsaLevel("v4", (*_V3, *_V4), 256), IsaLevel("v3", _V3, 48))  # quickest first


class Kernels:
    """The functions of one library. ``layers`` returns how many it computed, the others nothing."""

    def __init__(self, level: IsaLevel) -> None:
        self.level = level
        # NOTE: loaded after torch, to share its OpenMP: two thread teams would spin against each other.
        library = ctypes.CDLL(str(level.file))
        self.linear, self.norm, self.place_heads, self.gate, self.attend, self.adapt, self.layers = (
            _function(library, name, arguments) for name, arguments in _ARGUMENTS.items()
        )


@cache
def kernels() -> Kernels | None:
    """The quickest kernels that run here; None if no kernels do."""
    log = logging.getLogger(__name__)
    for level in LEVELS:
        if level.runs_here:
            try:
                return Kernels(level)
            except OSError as error:  # built for another platform, or truncated
                log.warning("%s cannot be loaded: %s", level.file.name, error)
    log.warning("no kernels were built for this CPU: using torch's operations, which are slower")
    return None


@cache
def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies the dtype natively. True when unknown."""
    capabilities = torch.cpu.get_capabilities()
    wanted = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}.get(dtype)
    return (
        wanted is None or capabilities.get("architecture") != "x86_64" or any(capabilities.get(name) for name in wanted)
    )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _function(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = getattr(library, f"torchrelay_{name}")
    function.argtypes, function.restype = arguments, c_long if name == "layers" else None
    return function

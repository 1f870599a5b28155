"""The compilations of kernels by Triton in this process, those that it reads from its cache on disk included."""

from __future__ import annotations

import time
from typing import Any

from triton import knobs

from torchrelay.engine.device_counts import COMPILATION_S, COMPILED_KERNELS


class Compilations:
    """Hooks of Triton. A compilation that fails stays running until another one ends."""

    num = 0
    is_running = False

    def __init__(self) -> None:
        self._begin_s = 0.0

    def begin(self, **_: object) -> None:
        self._begin_s = time.perf_counter()
        self.is_running = True

    def end(self, *, fn: Any, **_: object) -> None:
        COMPILED_KERNELS[fn.name] += 1
        COMPILATION_S[fn.name] += time.perf_counter() - self._begin_s
        self.num += 1  # before the next line: a thread that sees the end sees the number too
        self.is_running = False


COMPILATIONS = Compilations()
knobs.runtime.jit_cache_hook = COMPILATIONS.begin
knobs.runtime.jit_post_compile_hook = COMPILATIONS.end

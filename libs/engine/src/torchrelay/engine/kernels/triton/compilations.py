"""The number of kernels that Triton has compiled in this process, or read from its cache on disk."""

from __future__ import annotations

from triton import knobs


class Compilations:
    """A hook of Triton."""

    num = 0

    def __call__(self, **_: object) -> None:
        self.num += 1


COMPILATIONS = Compilations()
knobs.runtime.jit_post_compile_hook = COMPILATIONS

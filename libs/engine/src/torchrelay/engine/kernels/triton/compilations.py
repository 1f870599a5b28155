"""The compilations of kernels by Triton in this process, those that it reads from its cache on disk included."""

from __future__ import annotations

from triton import knobs


class Compilations:
    """Hooks of Triton. A compilation that fails stays running until another one ends."""

    num = 0
    is_running = False

    def begin(self, **_: object) -> None:
        self.is_running = True

    def end(self, **_: object) -> None:
        self.num += 1  # before the next line: a thread that sees the end sees the number too
        self.is_running = False


COMPILATIONS = Compilations()
knobs.runtime.jit_cache_hook = COMPILATIONS.begin
knobs.runtime.jit_post_compile_hook = COMPILATIONS.end

"""Builds the CPU kernels, once per instruction set that speeds them up.

The kernels are optional: without gcc torch's operations are used, which take about twice the time. Another compiler's
OpenMP would add a second team of threads beside torch's.
"""

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = ["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]

BUILT = Path("build", "kernels")


class BuildOnce(build_ext):
    """Compiles a kernel once for the installation in place and for wheels, which takes half a minute each time."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        kept, needed = BUILT / target.name, map(Path, ext.sources + ext.depends)
        if not kept.exists() or any(kept.stat().st_mtime < source.stat().st_mtime for source in needed):
            super().build_extension(ext)
            BUILT.mkdir(parents=True, exist_ok=True)
            draft = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(target, draft)
            draft.replace(kept)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, target)


setup(
    cmdclass={"build_ext": BuildOnce},
    options={"build_ext": {"parallel": 2}},
    ext_modules=[
        Extension(
            f"torchrelay.engine.kernels.cpu._kernels_{level}",
            ["src/torchrelay/engine/kernels/cpu/kernels.c"],
            depends=["setup.py", *map(str, Path("src/torchrelay/engine/kernels/cpu").glob("*.h"))],
            extra_compile_args=[*FLAGS, f"-march=x86-64-{level}"],
            extra_link_args=["-fopenmp"],
            libraries=["m"],
            optional=True,
        )
        for level in ("v3", "v4")
    ],
)

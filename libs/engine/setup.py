"""Builds the CPU kernels, once per instruction set that speeds them up.

The kernels are optional: without gcc torch's operations are used, which take about twice the time. Another compiler's
OpenMP would add a second team of threads beside torch's.
"""

from pathlib import Path

from setuptools import Extension, setup

FLAGS = ["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]

setup(
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
    ]
)

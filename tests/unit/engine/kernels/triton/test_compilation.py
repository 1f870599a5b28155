"""The kernels compile for GPUs with the arguments of their launches, which the interpreter cannot check, and fit them.

Needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Bytes that a block may have: A100; H100 and H200; RTX 5090, and so much from 86 on in every smaller GPU.
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
_PROGRAM = """
import json
import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from torchrelay.engine.device_counts import COMPILATION_S, COMPILED_KERNELS
from torchrelay.engine.kernels.triton import attention, attention_kernels, op_kernels
from torchrelay.engine.kernels.attention import Scoring, Span
from torchrelay.engine.kernels.triton.compilations import COMPILATIONS
from torchrelay.engine.kernels.triton.ops import TritonOps


class Driver:
    capability = 90

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device):
        return 0


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile(*arguments, **constants):
            num_compiled, name = COMPILATIONS.num, self.kernel.__name__
            num_of_kernel = COMPILED_KERNELS[name]
            made = self.kernel.warmup(*arguments, grid=grid, **constants)
            assert self.kernel.warmup(*arguments, grid=grid, **constants) is made
            assert COMPILATIONS.num == num_compiled + 1 and not COMPILATIONS.is_running
            assert COMPILED_KERNELS[name] == num_of_kernel + 1 and COMPILATION_S[name] > 0
            ptx = made.asm["ptx"]
            size = driver.capability, made.metadata.shared
            found.append([name, *size, "cp.async" in ptx, "mma" in ptx])
        return compile


found = []
ops, driver = TritonOps(), Driver()
triton.runtime.driver.set_active(driver)
for module in attention_kernels, op_kernels:
    for name in ("decode_split", "decode_merge", "prefill", "norm_rows", "place_heads", "gate_rows"):
        if hasattr(module, name):
            setattr(module, name, Compiled(getattr(module, name)))

spans = [Span(0, 1, np.arange(40)), Span(1, 5, np.arange(48, 88))]
LARGEST = [(torch.bfloat16, tl.bfloat16, 128, None), (torch.bfloat16, tl.bfloat16, 256, 50.0)]
OTHERS = [(torch.float16, tl.float16, 96, None), (torch.float32, tl.float32, 32, None)]
for driver.capability, (dtype, product, head_dim, cap) in [
    *((90, shape) for shape in LARGEST + OTHERS),
    *((capability, shape) for capability in (80, 120) for shape in LARGEST),
]:
    attention._product_dtype = lambda kv: product
    backend = attention.TritonAttention(16)
    queries, kv = torch.zeros(6, 32, head_dim, dtype=dtype), torch.zeros(2, 96, 8, head_dim, dtype=dtype)
    backend.attend(queries, kv, backend.plan(spans, None, dtype, torch.device("cpu")), Scoring(0.1, cap))
    if cap or driver.capability != 90:
        continue
    heads, angles = torch.zeros(6, 48, head_dim, dtype=dtype), torch.zeros(6, 1, head_dim // 2, dtype=dtype)
    norms = torch.zeros(40, head_dim, dtype=dtype)
    for norm in (None, norms):
        ops.place_heads(heads, norm, (1e-5, norm is not None), (angles, angles), kv, torch.arange(6))
    x, weight = torch.zeros(6, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    ops.rms_norm(x, weight, 1e-5, False)
    ops.add_norm(x, x, weight, 1e-5, True)
    ops.gate(x, "silu")
    ops.gate(x, "gelu_pytorch_tanh")
print(json.dumps(found))
"""


def test_every_kernel_compiles_for_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", _PROGRAM]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    actual = json.loads(ended.stdout.splitlines()[-1])
    assert {name for name, *_ in actual} == {
        *("decode_split", "decode_merge", "prefill"),
        *("norm_rows", "place_heads", "gate_rows"),
    }
    assert len(actual) == (4 + 2 * 2) * 3 + 3 * (2 + 2 + 2)
    assert {capability for _, capability, *_ in actual} == MAX_SHARED_BYTES.keys()
    assert [each for each in actual if each[2] > MAX_SHARED_BYTES[each[1]]] == []
    for name, *_, copies_ahead, multiplies in actual[:3]:  # bf16 with heads of 128
        if name != "decode_merge":
            assert copies_ahead, f"{name} does not read ahead"
            assert multiplies, f"{name} does not use the matrix units"

"""Triton kernels of the operations between a layer's matrix products.

Sums and functions are fp32, rounded where the plain operations of ``model`` round, except the rotation, which rounds
once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _weighed(normed: tl.tensor, weight: tl.tensor, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr) -> tl.tensor:
    if UNIT_OFFSET:
        weight = 1.0 + weight
    else:
        normed = normed.to(dtype).to(tl.float32)
    return normed * weight


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0)))  # below -80 the result is 0 in fp32, and exp overflows


@triton.jit  # type: ignore[untyped-decorator]
def norm_rows(
    x: tl.tensor,  # [rows, size]
    added: tl.tensor,  # as x, added to it first; read only if ADDS
    weight: tl.tensor,  # [size]
    total: tl.tensor,  # out if ADDS: x + added
    out: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    """The root-mean-square norm of one row, or of a sum."""
    columns = tl.arange(0, BLOCK)
    is_there = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    values = tl.load(x + places, mask=is_there, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if ADDS:
        values += tl.load(added + places, mask=is_there, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(total + places, rounded, mask=is_there)
        values = rounded.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    factors = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + places, _weighed(normed, factors, dtype, UNIT_OFFSET).to(dtype), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def place_heads(
    heads: tl.tensor,  # [rows, heads + 2 * kv heads, head_dim]: queries, keys, values
    norms: tl.tensor,  # [heads + kv heads, head_dim]; read only if NORMED
    cos: tl.tensor,  # [rows, head_dim / 2]
    sin: tl.tensor,
    slots: tl.tensor,  # int64 [rows]
    kv: tl.tensor,  # [2, slots, kv heads, head_dim]
    queries: tl.tensor,  # out [rows, heads, head_dim]
    eps: tl.tensor,
    plane_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    """Normalises and rotates a query or key head of one row; stores keys and values in their slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    is_there = columns < HALF
    own = heads + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    first = tl.load(own + columns, mask=is_there, other=0.0)
    second = tl.load(own + HALF + columns, mask=is_there, other=0.0)
    dtype: tl.constexpr = kv.dtype.element_ty
    if head < HEADS + KV_HEADS:
        left, right = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(left * left + right * right, 0) / (2 * HALF) + eps)
            norm = norms + head * 2 * HALF + columns
            weight = tl.load(norm, mask=is_there, other=0.0).to(tl.float32)
            left = _weighed(left * scale, weight, dtype, UNIT_OFFSET).to(dtype).to(tl.float32)
            weight = tl.load(norm + HALF, mask=is_there, other=0.0).to(tl.float32)
            right = _weighed(right * scale, weight, dtype, UNIT_OFFSET).to(dtype).to(tl.float32)
        turn = row * HALF + columns
        cosine = tl.load(cos + turn, mask=is_there, other=0.0).to(tl.float32)
        sine = tl.load(sin + turn, mask=is_there, other=0.0).to(tl.float32)
        first = (left * cosine - right * sine).to(dtype)
        second = (right * cosine + left * sine).to(dtype)
    if head < HEADS:
        place = queries + (row * HEADS + head) * 2 * HALF
    else:
        plane = (head - HEADS) // KV_HEADS
        place = kv + plane * plane_stride
        place += (tl.load(slots + row) * KV_HEADS + (head - HEADS) % KV_HEADS) * 2 * HALF
    tl.store(place + columns, first, mask=is_there)
    tl.store(place + HALF + columns, second, mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def gate_rows(gate_up: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr) -> None:
    """activation(gate) * up for a block of one row of [rows, 2 * SIZE]."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < SIZE
    row = tl.program_id(0).to(tl.int64)
    own = gate_up + row * 2 * SIZE + columns
    gate = tl.load(own, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(own + SIZE, mask=is_there, other=0.0).to(tl.float32)
    if SILU:
        activated = gate * _sigmoid(gate)
    else:  # GELU's approximation by tanh(x) = 2 sigmoid(2 x) - 1
        activated = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * SIZE + columns, (activated.to(dtype).to(tl.float32) * up).to(dtype), mask=is_there)

"""Triton kernels: attention over paged KV.

A *sheet* describes the sequences: int32 [sequences, 3 + pages], each row being the sequence's first row in the batch,
its number of rows, its number of positions (these rows included), and its page table. Softmax is in fp32 and base two;
``MULTIPLIED`` is the dtype of matrix products. A page's content beyond the last position is never used.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

SHEET_HEADER: Final = 3
_HEADER: tl.constexpr = tl.constexpr(SHEET_HEADER)


@triton.jit  # type: ignore[untyped-decorator]
def _squeezed(scores: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    """Scores scaled, capped by a tanh if ``CAPPED``, and in base two."""
    scores = scores * scale
    if CAPPED:
        faded = tl.exp(-2.0 * tl.abs(scores) / cap)
        scores = tl.where(scores < 0, -cap, cap) * (1.0 - faded) / (1.0 + faded)
    return scores * 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def decode_split(
    queries: tl.tensor,  # [rows, kv heads * group, head_dim]
    kv: tl.tensor,  # [2, slots, kv heads, head_dim]
    sheet: tl.tensor,
    partial: tl.tensor,  # fp32 out [sequences, kv heads * group, splits, head_dim]
    weights: tl.tensor,  # fp32 out, the same without head_dim: base-two logarithm of each split's weight
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    sheet_stride: tl.tensor,
    plane_stride: tl.tensor,
    num_splits: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
) -> None:
    """Attends one split of the positions of a sequence of one row, for a kv head and the query heads that share it.

    Flash decoding (Dao et al. 2023): the splits run in parallel and are merged by ``decode_merge``.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = sheet + sequence * sheet_stride
    row = tl.load(entry)
    length = tl.load(entry + 2)
    begin = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - begin, num_splits), BLOCK_KV) * BLOCK_KV
    first = begin + split * share
    last = tl.minimum(first + share, length)

    heads, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    is_head, is_dim = heads < GROUP, dims < HEAD_DIM
    wanted = is_head[:, None] & is_dim[None, :]
    head = kv_head * GROUP + heads
    query_places = (row * KV_HEADS * GROUP + head).to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + query_places, mask=wanted, other=0.0).to(MULTIPLIED)
    highest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    mean = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    for at in range(first, last, BLOCK_KV):
        positions = at + tl.arange(0, BLOCK_KV)
        is_there = positions < last
        pages = tl.load(entry + _HEADER + positions // PAGE, mask=is_there, other=0)
        slots = pages.to(tl.int64) * PAGE + positions % PAGE
        places = (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        readable = is_there[:, None] & is_dim[None, :]
        keys = tl.load(kv + places, mask=readable, other=0.0)
        scores = tl.dot(query, tl.trans(keys.to(MULTIPLIED)), input_precision="ieee")
        scores = _squeezed(scores, scale, cap, CAPPED)
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        faded = tl.exp2(highest - higher)
        shares = tl.exp2(scores - higher[:, None])
        values = tl.load(kv + plane_stride + places, mask=readable, other=0.0)
        mean = mean * faded[:, None] + tl.dot(shares.to(MULTIPLIED), values.to(MULTIPLIED), input_precision="ieee")
        total = total * faded + tl.sum(shares, 1)
        highest = higher
    is_empty = total == 0.0
    place = ((sequence * KV_HEADS * GROUP + head) * num_splits + split).to(tl.int64)
    mean = mean / tl.where(is_empty, 1.0, total)[:, None]
    tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], mean, mask=wanted)
    weight = tl.where(is_empty, float("-inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
    tl.store(weights + place, weight, mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def decode_merge(
    partial: tl.tensor,
    weights: tl.tensor,
    sheet: tl.tensor,
    out: tl.tensor,  # [rows, heads, head_dim]
    sheet_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Merges the splits of one sequence and head into their weighted mean."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(sheet + sequence * sheet_stride).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    place = (sequence * HEADS + head).to(tl.int64) * SPLITS + splits
    weight = tl.load(weights + place)
    weight = tl.exp2(weight - tl.max(weight, 0))
    means = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :], mask=is_dim[None, :], other=0.0)
    mean = tl.sum(means * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dims, mean.to(out.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator]
def prefill(
    queries: tl.tensor,  # [rows, heads, head_dim]
    kv: tl.tensor,  # [2, slots, kv heads, head_dim]
    sheet: tl.tensor,
    blocks: tl.tensor,  # int32 [blocks, 2]: the sequence, and the block's first row in it
    out: tl.tensor,  # as queries
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    sheet_stride: tl.tensor,
    plane_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
) -> None:
    """Attends a block of rows of one sequence and head to the positions before them and to themselves."""
    block, head = tl.program_id(0), tl.program_id(1)
    sequence, first_row = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    entry = sheet + sequence * sheet_stride
    row, num_rows, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)

    rows, dims = first_row + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    own = length - num_rows + rows  # each row's position
    wanted = (rows < num_rows)[:, None] & is_dim[None, :]
    query_places = ((row + rows).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + query_places, mask=wanted, other=0.0).to(MULTIPLIED)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    mean = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    begin = tl.maximum(length - num_rows + first_row - window + 1, 0)
    end = tl.minimum(length - num_rows + first_row + BLOCK_ROWS, length)
    for at in range(begin, end, BLOCK_KV):
        positions = at + tl.arange(0, BLOCK_KV)
        is_there = positions < end
        pages = tl.load(entry + _HEADER + positions // PAGE, mask=is_there, other=0)
        slots = pages.to(tl.int64) * PAGE + positions % PAGE
        places = (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        readable = is_there[:, None] & is_dim[None, :]
        keys = tl.load(kv + places, mask=readable, other=0.0)
        scores = tl.dot(query, tl.trans(keys.to(MULTIPLIED)), input_precision="ieee")
        scores = _squeezed(scores, scale, cap, CAPPED)
        age = own[:, None] - positions[None, :]
        scores = tl.where((age >= 0) & (age < window) & is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row sees nothing here if its window begins later, or if it is padding.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        faded = tl.exp2(highest - base)
        shares = tl.exp2(scores - base[:, None])
        values = tl.load(kv + plane_stride + places, mask=readable, other=0.0)
        mean = mean * faded[:, None] + tl.dot(shares.to(MULTIPLIED), values.to(MULTIPLIED), input_precision="ieee")
        total = total * faded + tl.sum(shares, 1)
        highest = higher
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + query_places, mean.to(out.dtype.element_ty), mask=wanted)

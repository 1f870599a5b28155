"""The pool's pages and the hidden states of waiting prompts."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.unit.engine.harness import group_of, prompt_of
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.kv.hidden_states import HiddenStates
from torchrelay.engine.kv.layout import KvShape
from torchrelay.engine.kv.pool import KvPool

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype_bytes=4)


def test_partition_is_layer_major_and_fits() -> None:
    pool = KvPool(10_000)
    pages = pool.partition(SHAPE, torch.float32, page_tokens=8)
    assert SHAPE.bytes_per_token == 2 * 3 * 2 * 4 * 4
    assert pages.tables.allocator.num_pages == 10_000 // (8 * SHAPE.bytes_per_token)
    assert pages.kv.shape == (3, 2, pages.tables.allocator.num_pages * 8, 2, 4)
    assert pages.kv[1, 0].is_contiguous()


def test_pool_is_partitioned_again_for_other_dtype() -> None:
    pool = KvPool(1 << 16)
    first = pool.partition(SHAPE, torch.float32, page_tokens=8)
    second = pool.partition(KvShape(1, 1, 8, 2), torch.bfloat16, page_tokens=16)
    assert second.kv.data_ptr() == first.kv.data_ptr()
    assert second.tables.allocator.num_pages == (1 << 16) // (16 * 32)


def test_copy_page_copies_all_layers() -> None:
    pages = KvPool(1 << 16).partition(SHAPE, torch.float32, page_tokens=8)
    pages.kv.copy_(torch.randn(pages.kv.shape))
    pages.copy_page(1, 5)
    assert torch.equal(pages.kv[:, :, 40:48], pages.kv[:, :, 8:16])
    assert not torch.equal(pages.kv[:, :, 32:40], pages.kv[:, :, 8:16])


def test_hidden_states_are_kept_until_dropped() -> None:
    first, second = SequenceGroup.of(group_of(prompt_of(5), forced=[(), (7,)])).contexts
    states, rows = HiddenStates(20), torch.randn(6, 8)
    states.write(first, 2, rows[2:5])
    states.write(first, 0, rows[:2])
    states.write(second, 0, rows)
    assert states.num_free_positions == 20 - 5 - 6
    assert torch.equal(states.of(first), rows[:5]) and torch.equal(states.of(second), rows)
    states.drop(first)
    states.drop(first)
    with pytest.raises(KeyError):
        states.of(first)
    assert states.num_free_positions == 20 - 6
    assert torch.equal(states.of(second), rows)


def test_hidden_states_end_with_their_context() -> None:
    """A preempted group's contexts are replaced."""
    group, states = SequenceGroup.of(group_of(prompt_of(5))), HiddenStates(20)
    states.write(group.contexts[0], 0, torch.zeros(5, 8))
    tensor = weakref.ref(states.of(group.contexts[0]))
    group.contexts = group.contexts_left()
    assert tensor() is None

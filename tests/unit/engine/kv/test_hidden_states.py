from __future__ import annotations

import weakref

import pytest
import torch

from tests.unit.engine.harness import group_of, prompt_of
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.kv.hidden_states import HiddenStates


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

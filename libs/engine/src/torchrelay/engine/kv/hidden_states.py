"""Hidden states of prompts at a layer boundary above 0."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor

from torchrelay.engine.batching.sequences import PrefillContext


class HiddenStates:
    """A tensor per context, [num_tokens, hidden]. All methods run on the engine thread.

    Prompts that begin here must fit into ``max_positions``. Imported prompts count, but are not refused.
    """

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._tensors: WeakKeyDictionary[PrefillContext, Tensor] = WeakKeyDictionary()

    @property
    def num_free_positions(self) -> int:
        return self._max_positions - sum(len(states) for states in self._tensors.values())

    def of(self, context: PrefillContext) -> Tensor:
        return self._tensors[context]

    def write(self, context: PrefillContext, begin: int, rows: Tensor) -> None:
        """Sets the positions from ``begin`` on."""
        states = self._tensors.get(context)
        if states is None:
            states = self._tensors[context] = rows.new_empty(context.num_tokens, *rows.shape[1:])
        states[begin : begin + len(rows)] = rows

    def drop(self, context: PrefillContext) -> None:
        self._tensors.pop(context, None)

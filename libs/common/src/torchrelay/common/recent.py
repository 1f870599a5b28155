"""A dictionary of bounded size, for hot paths: what was set longest ago is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """The keys that were set last, at most ``max_keys``; one that is set again is the newest. Reads change nothing."""

    def __init__(self, max_keys: int) -> None:
        super().__init__()
        self._max_keys = max_keys

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._max_keys:
            self.popitem(last=False)

"""A dictionary that keeps what was set last."""

from __future__ import annotations

from torchrelay.common.recent import Recent


def test_oldest_set_key_is_dropped_despite_reads() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    assert recent.get("a") == recent.setdefault("a", 0) == 1
    recent["c"] = 3
    assert list(recent.items()) == [("b", 2), ("c", 3)]
    recent["b"] = 4
    recent.setdefault("d", 5)
    assert list(recent.items()) == [("b", 4), ("d", 5)]

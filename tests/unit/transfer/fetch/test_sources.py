"""A receiver keeps its key secret."""

from __future__ import annotations

from torchrelay.transfer.fetch.sources import Receiver


def test_key_never_printed() -> None:
    assert "secret" not in repr(Receiver("host-r", b"secret"))

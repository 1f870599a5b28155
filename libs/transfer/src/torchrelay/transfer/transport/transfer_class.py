"""The classes of transfers, by priority on a shared link."""

from __future__ import annotations

import enum


class TransferClass(enum.IntEnum):
    """Each class yields to those before it. The numbers go over the wire."""

    KV = 0  # KV pages and activations: a request waits for them
    URGENT = 1  # parameters of a model that a request waits for
    IDLE = 2  # parameters that no request waits for: cache copies and their repair

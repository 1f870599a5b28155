"""Embeddings: the hidden states of a prompt, pooled."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrelay.engine.core import Embedding, GroupSpec, Pooling


def pool(group: GroupSpec, num_cached: int, last: Tensor) -> Embedding:
    """The embedding of a prompt; ``last`` is its last position, [1, hidden], after the final norm."""
    assert group.pooling is Pooling.LAST_TOKEN, f"no pooling {group.pooling}"
    values = last[0].float().cpu()
    is_finite = bool(torch.isfinite(values).all())
    return Embedding(group.group_id, values.numpy().tobytes() if is_finite else b"", num_cached)

"""Embeddings: the hidden states of a prompt, pooled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrelay.engine.core import Embedding, GroupSpec, Pooling


def pool(group: GroupSpec, num_cached: int, hidden: Tensor, final_norm: Callable[[Tensor], Tensor]) -> Embedding:
    """The embedding of a prompt. ``hidden`` has its positions after the last layer, [positions, hidden]: all of them
    for an encoder's poolings, else at least the last.
    """
    match group.pooling:
        case Pooling.LAST_TOKEN:
            pooled = final_norm(hidden[-1:])[0]
        case Pooling.FIRST_TOKEN:
            pooled = final_norm(hidden[:1])[0]
        case Pooling.MEAN:
            pooled = final_norm(hidden).float().mean(0)
        case _:
            raise AssertionError(f"no pooling {group.pooling}")
    return embedding_of(group.group_id, pooled, num_cached)


def embedding_of(group_id: str, vector: Tensor, num_cached: int) -> Embedding:
    """The embedding of a group from its vector, of any floating dtype."""
    values = vector.float().cpu()
    is_finite = bool(torch.isfinite(values).all())
    return Embedding(group_id, values.numpy().tobytes() if is_finite else b"", num_cached)

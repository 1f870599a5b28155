"""What a worker does before it is a slot, so that a model's first request pays for nothing but itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def warm_up(device: str) -> None:
    """Makes torch create its thread pools and load its kernels for the dtypes and shapes that models use."""
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.zeros(256, 256, dtype=dtype, device=device)
            for num_tokens in (1, 64):
                hidden = F.linear(torch.zeros(num_tokens, 256, dtype=dtype, device=device), weight)
                heads = hidden.view(1, num_tokens, 4, 64).transpose(1, 2)
                F.scaled_dot_product_attention(heads, heads, heads)
                F.rms_norm(hidden, (256,))
                F.silu(hidden)

"""The second half of a decoder layer: one gated MLP, or a mixture of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.fused import FusedSteps
from torchrelay.engine.linear import Matrix, linear
from torchrelay.engine.weights import LayerWeights
from torchrelay.transfer.model_config import ExpertConfig


def feed_forward(
    hidden: Tensor, weights: LayerWeights, activation: str, experts: ExpertConfig | None, steps: FusedSteps | None
) -> Tensor:
    """[rows, hidden] to the same; ``steps`` if there are any where these tensors are."""
    if experts is None or weights.router is None:
        return gated(hidden, weights.gate_up, weights.down, activation, steps)
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "experts are never reordered"
    chosen, shares = route(hidden, weights.router, experts)
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = torch.where(chosen == expert)
        given = gated(hidden[rows], gate_up[expert], down[expert], activation, steps)
        out.index_add_(0, rows, given * shares[rows, places, None])
    return out.to(hidden.dtype)


def gated(hidden: Tensor, gate_up: Matrix, down: Matrix, activation: str, steps: FusedSteps | None = None) -> Tensor:
    """down(activation(gate(x)) * up(x)), gate and up being the halves of one projection."""
    both = linear(hidden, gate_up)
    return linear(bent(both, activation) if steps is None else steps.gate(both, activation), down)


def bent(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of [rows, 2 * size], whose halves they are."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def route(hidden: Tensor, router: Tensor, experts: ExpertConfig) -> tuple[Tensor, Tensor]:
    """Which experts each row goes to, and their shares (fp32) in what it gets: both [rows, experts per token]."""
    likely = linear(hidden, router).softmax(-1, dtype=torch.float32)
    shares, chosen = likely.topk(experts.per_token, dim=-1)
    if experts.sums_to_one:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares

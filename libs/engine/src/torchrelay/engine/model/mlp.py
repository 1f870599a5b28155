"""The second half of a decoder layer: a gated MLP, or a mixture of gated MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.kernels.fused_ops import FusedOps
from torchrelay.engine.kernels.layer import Int8Matrix, LayerWeights, Matrix
from torchrelay.engine.kernels.linear import linear
from torchrelay.modelspec.config import ExpertConfig

# Adds the changes of adapters to a projection's output: called with its group, its input and its output.
Adapt = Callable[[str, Tensor, Tensor], None]


def feed_forward(
    hidden: Tensor,
    weights: LayerWeights,
    activation: str,
    experts: ExpertConfig | None,
    ops: FusedOps | None,
    adapt: Adapt,
) -> Tensor:
    """[rows, hidden] -> the same; with fused ``ops`` if the device has them. Adapters change no experts."""
    if experts is None or weights.router is None:
        biases = weights.gate_up_bias, weights.down_bias
        return gated_mlp(hidden, weights.gate_up, weights.down, activation, ops, biases, adapt)
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, Tensor | Int8Matrix) and isinstance(down, Tensor | Int8Matrix), "never reordered"
    chosen, shares = route(hidden, weights.router, experts)
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = torch.where(chosen == expert)
        out_rows = gated_mlp(hidden[rows], gate_up[expert], down[expert], activation, ops)
        out.index_add_(0, rows, out_rows * shares[rows, places, None])
    mixed = out.to(hidden.dtype)
    if weights.shared_gate is None or weights.shared_gate_up is None or weights.shared_down is None:
        return mixed
    shared = gated_mlp(hidden, weights.shared_gate_up, weights.shared_down, activation, ops)
    return mixed + linear(hidden, weights.shared_gate).sigmoid() * shared


def gated_mlp(
    hidden: Tensor,
    gate_up: Matrix,
    down: Matrix,
    activation: str,
    ops: FusedOps | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    adapt: Adapt = lambda group, x, out: None,
) -> Tensor:
    """down(activation(gate(x)) * up(x)); gate and up are the halves of one projection."""
    both = linear(hidden, gate_up, biases[0])
    adapt("gate_up", hidden, both)
    gated = activate_and_multiply(both, activation) if ops is None else ops.gate(both, activation)
    out = linear(gated, down, biases[1])
    adapt("down", gated, out)
    return out


def activate_and_multiply(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, the halves of [rows, 2 * size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def route(hidden: Tensor, router: Tensor, experts: ExpertConfig) -> tuple[Tensor, Tensor]:
    """The experts of each row, and their weights in its output (fp32): both [rows, experts per token]."""
    likely = linear(hidden, router).softmax(-1, dtype=torch.float32)
    shares, chosen = likely.topk(experts.per_token, dim=-1)
    if experts.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares

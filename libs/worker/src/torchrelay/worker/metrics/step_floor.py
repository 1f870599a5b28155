"""The least time of a decode step: that of reading what it needs from the device's memory.

The roofline model (Williams et al., CACM 2009) calls a computation bound by memory when its data, not its arithmetic,
sets its time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.common.latency.latency_model import StepWork
from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.opaque import read_model
from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.transfer.manifest import Manifest

_BOUND_FACTOR = 1.5  # a step that takes less than this multiple of its floor is bound by memory


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The bytes that decode steps of a model read, on a device that reads ``bytes_per_s``.

    The embeddings are left out: a step reads a row of them per choice, unless they are the head, too.
    """

    bytes_per_s: float
    weight_bytes: int  # that every step reads
    expert_bytes: int = 0  # of which a token reads ``expert_share``
    expert_share: float = 0.0
    kv_bytes: float = 0.0  # per attended position; layers that attend to a window count for nothing

    @classmethod
    def of(cls, manifest: Manifest, bytes_per_s: float) -> StepFloor | None:
        """The floor of a pack's model; None if the device's rate is unknown (0)."""
        if not bytes_per_s:
            return None
        read_bytes = sum(tensor.num_bytes for tensor in manifest.tensors)
        model = read_model(manifest.config, is_opaque=manifest.is_opaque)
        if not isinstance(model, ModelConfig):
            return cls(bytes_per_s, read_bytes - manifest.tensors[0].num_bytes)
        if not model.tied_embeddings:
            read_bytes -= manifest.tensors[0].num_bytes
        full_layers = sum(window is None for window in model.windows)
        kv_bytes = 2.0 * full_layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES[manifest.dtype]
        if (experts := model.experts) is None:
            return cls(bytes_per_s, read_bytes, kv_bytes=kv_bytes)
        expert_bytes = sum(tensor.num_bytes for tensor in manifest.tensors if ".experts." in tensor.name)
        share = experts.per_token / experts.count
        return cls(bytes_per_s, read_bytes - expert_bytes, expert_bytes, share, kv_bytes)

    def seconds(self, work: StepWork) -> float:
        """The floor of a step. The tokens of a batch choose their experts as if at random."""
        experts = self.expert_bytes * (1 - (1 - self.expert_share) ** work.num_decoding)
        return (self.weight_bytes + experts + self.kv_bytes * work.num_decode_attended) / self.bytes_per_s

    def is_bound_by_memory(self, work: StepWork, step_s: float) -> bool:
        """Whether a step that only decodes takes little longer than its reads."""
        return work.num_decoding > 0 and not work.num_prefilled and step_s < _BOUND_FACTOR * self.seconds(work)

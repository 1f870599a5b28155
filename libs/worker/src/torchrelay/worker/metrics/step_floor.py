"""The least time of a decode step: that of reading what it needs from the device's memory.

The roofline model (Williams et al., CACM 2009) calls a computation bound by memory when its data, not its arithmetic,
sets its time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.common.latency.latency_model import StepWork
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.sizing.footprint import Footprint, footprint_of
from torchrelay.transfer.manifest import Manifest

_BOUND_FACTOR = 1.5  # a step that takes less than this multiple of its floor is bound by memory


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Decode steps of a model on a device that reads ``bytes_per_s``."""

    footprint: Footprint
    bytes_per_s: float

    @classmethod
    def of(cls, manifest: Manifest, bytes_per_s: float) -> StepFloor | None:
        """The floor of a pack's model; None if the device's rate is unknown (0), or the model to this release."""
        if not bytes_per_s:
            return None
        try:
            return cls(footprint_of(manifest.config, manifest.num_bytes), bytes_per_s)
        except UnsupportedModel:  # an engine of another release may know it
            return None

    def seconds(self, work: StepWork) -> float:
        """The time of reading the weights, and the keys and values that the choices attend to."""
        number, footprint = work.num_decoding, self.footprint
        attended = number * footprint.attended(work.num_decode_attended / number) if number else 0.0
        return (footprint.read_bytes(number) + footprint.kv_bytes_per_token * attended) / self.bytes_per_s

    def is_bound_by_memory(self, work: StepWork, step_s: float) -> bool:
        """Whether a step that only decodes takes little longer than its reads."""
        return work.num_decoding > 0 and not work.num_prefilled and step_s < _BOUND_FACTOR * self.seconds(work)

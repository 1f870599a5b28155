"""Descriptions of the fleets of the scheduler's bench."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchrelay.control.v1 import types_pb2

CLUSTER_KEY = "00112233445566778899aabbccddeeff"
NUM_LAYERS = 32
BLOCK_TOKENS = 64
PACK_BYTES = 16 << 30
KV_POOL_BYTES = 40 << 30
PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
BOTH = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet whose first workers serve, with ``num_prefill`` and ``num_decode`` instances per model; the rest is free.

    If ``num_prefill`` is 0, instances play both roles. ``figures_change``: each report has other figures of the work.
    """

    num_workers: int
    num_models: int
    num_prefill: int
    num_decode: int
    idle_timeout_s: float = 3600.0
    workers_per_host: int = 8
    figures_change: bool = False

    @property
    def num_hosts(self) -> int:
        return -(-self.num_workers // self.workers_per_host)

    def versions(self) -> list[types_pb2.ModelVersion]:
        return [self.version(number) for number in range(self.num_models)]

    def version(self, number: int) -> types_pb2.ModelVersion:
        """An 8B model."""
        shape = types_pb2.ModelShape(num_layers=NUM_LAYERS, num_kv_heads=8, head_dim=128, kv_dtype_bytes=2)
        return types_pb2.ModelVersion(
            version_id=f"ver-{number}",
            model=f"tenant-{number % 50}/model-{number}",
            tenant_id=f"ten-{number % 50}",
            pack_id=f"pack-{number}",
            pack_bytes=PACK_BYTES,
            shape=shape,
            routing_block_tokens=BLOCK_TOKENS,
            scaling=types_pb2.ScalingSettings(idle_timeout_s=self.idle_timeout_s, max_instances=16),
        )

    def served(self) -> Iterator[tuple[int, tuple[types_pb2.Role.ValueType, ...]]]:
        """Model and roles of each serving worker, in the order of the workers."""
        for model in range(self.num_models):
            for _ in range(self.num_prefill):
                yield model, (PREFILL,)
            for _ in range(self.num_decode):
                yield model, (DECODE,) if self.num_prefill else BOTH

"""Clusters and models of published shape."""

from __future__ import annotations

from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.sim.scenario import Fleet, ServedModel

_DEVICE_BYTES_PER_S = 1.6e12  # reached of a device's memory
_GB = 10**9

# 4 hosts with 8 devices on NVLink, 100 Gbit/s; 2 hosts with 8 devices on PCIe, 100 Gbit/s.
CLUSTER_A = Fleet(4, (4, 2, 1, 1), 12.5e9, 25e9, 2.5e9, 480 * _GB)
CLUSTER_B = Fleet(2, (4, 2, 1, 1), 12.5e9, 12e9, 1.25e9, 480 * _GB)


def served_model(
    name: str,
    num_devices: int,
    billions: float,
    num_layers: int,
    kv_bytes_per_token: int,
    ttft_base_s: float,
    prefill_tokens_per_s: float,
    tpot_target_s: float,
) -> ServedModel:
    """In bf16. A step reads all weights and the KV attended to; a prompt's positions take the published rate."""
    pack_bytes = int(billions * 2 * _GB)
    reads_s = 1 / (_DEVICE_BYTES_PER_S * num_devices)
    decode = StepCost(pack_bytes * reads_s + 0.003, 5e-5, kv_bytes_per_token * reads_s, num_steps=1000)
    prefill = StepCost(0.005, 1 / prefill_tokens_per_s, 0.0, num_steps=1000)
    latency = LatencyModel(prefill, decode, token_budget=2048)
    return ServedModel(
        name,
        num_devices,
        pack_bytes,
        num_layers,
        kv_bytes_per_token,
        latency,
        ttft_base_s,
        prefill_tokens_per_s,
        tpot_target_s,
    )


def twelve_models() -> tuple[ServedModel, ...]:
    """Six of 8B, four of 24B on two devices, two of 72B on four; the order is that of their popularity."""
    small = [served_model(f"t/8b-{n}", 1, 8, 32, 131072, 0.45, 15e3, 0.10) for n in range(6)]
    middle = [served_model(f"t/24b-{n}", 2, 24, 40, 163840, 0.7, 12e3, 0.15) for n in range(4)]
    large = [served_model(f"t/72b-{n}", 4, 72, 80, 327680, 1.25, 5.3e3, 0.20) for n in range(2)]
    order = [small[0], middle[0], small[1], large[0], small[2], middle[1], small[3], middle[2], small[4], large[1]]
    return (*order, middle[3], small[5])

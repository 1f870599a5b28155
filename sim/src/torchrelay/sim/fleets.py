"""Clusters and models of published shape."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import MISSING, fields
from itertools import cycle, islice
from pathlib import Path

from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.sim.scenario import Fleet, ServedModel

_DEVICE_BYTES_PER_S = 1.6e12  # achieved bandwidth of a device's memory
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
    """A model in bf16. A decode step reads all weights and the attended KV; prefill runs at the published rate."""
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


_ORDER = ("8b", "24b", "8b", "72b", "8b", "24b", "8b", "24b", "8b", "72b", "24b", "8b")


def published_models(number: int) -> tuple[ServedModel, ...]:
    """Models by falling popularity. Of each twelve, six have 8B, four 24B on two devices, two 72B on four devices."""
    seen: Counter[str] = Counter()
    models = []
    for size in islice(cycle(_ORDER), number):
        name = f"t/{size}-{seen[size]}"
        seen[size] += 1
        match size:
            case "8b":
                models.append(served_model(name, 1, 8, 32, 131072, 0.45, 15e3, 0.10))
            case "24b":
                models.append(served_model(name, 2, 24, 40, 163840, 0.7, 12e3, 0.15))
            case _:
                models.append(served_model(name, 4, 72, 80, 327680, 1.25, 5.3e3, 0.20))
    return tuple(models)


def twelve_models() -> tuple[ServedModel, ...]:
    return published_models(12)


def read_fleet(path: Path) -> Fleet:
    """Reads a JSON object with the fields of ``Fleet``. Raises ``ValueError`` that names the field at fault."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    names = {each.name: each.default is MISSING for each in fields(Fleet)}
    if not isinstance(values, dict) or (unknown := sorted(values.keys() - names.keys())):
        raise ValueError(
            f"{path}: expected an object with {', '.join(names)}" + (f"; not {unknown[0]}" if values else "")
        )
    if missing := [name for name, is_needed in names.items() if is_needed and name not in values]:
        raise ValueError(f"{path}: {missing[0]} is missing")
    groups = values.pop("groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(size, int) and size > 0 for size in groups):
        raise ValueError(f"{path}: groups must be a list with the devices of each slot of a host, as [4, 2, 1, 1]")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{path}: {name} must be a number above 0")
    return Fleet(groups=tuple(groups), **values)

"""Devices that compute models: their memory, rates and prices, as published, or as a user's file says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

# Attained shares of the published peaks. Kernels that stream weights or KV read at 75 to 90 % of the bandwidth.
# Dense matrix products of whole layers, the rests of attention, norms and activations included, take half to two
# thirds of the peak on GPUs of the data centre: the "model FLOPs utilisation" of prefill.
BANDWIDTH_SHARE: Final = 0.8
COMPUTE_SHARE: Final = 0.6
LINK_SHARE: Final = 0.8  # of a PCIe link, after its headers
# Kernel launches, sampling and the choice of the next batch, which no faster device shortens.
STEP_OVERHEAD_S: Final = 0.002
TENSOR_PARALLEL_SHARE: Final = 0.85  # of the rates of several devices together: they exchange activations twice a layer


class DeviceFault(ValueError):
    """An entry of a devices file that cannot be used; ``field`` is DEVICE.FIELD."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Device:
    """A device. Rates are peaks, of which a share is attained."""

    name: str
    memory_bytes: float
    bytes_per_s: float  # of its memory
    flops: float  # per second, dense, 16-bit
    flops_8bit: float
    link_bytes_per_s: float  # to the host, one direction; 0: it computes in the host's memory
    price: float | None = None  # dollars per hour; None: unknown
    bandwidth_share: float = BANDWIDTH_SHARE
    compute_share: float = COMPUTE_SHARE
    step_overhead_s: float = STEP_OVERHEAD_S
    choice_overhead_s: float = 0.0  # of each running choice in a step
    origin: str = "published"  # of the rates: published, the user's file, or measured

    def times(self, number: int) -> Device:
        """``number`` of these that compute each layer together."""
        if number == 1:
            return self
        rate = number * TENSOR_PARALLEL_SHARE
        return replace(
            self,
            memory_bytes=self.memory_bytes * number,
            bytes_per_s=self.bytes_per_s * rate,
            flops=self.flops * rate,
            flops_8bit=self.flops_8bit * rate,
            link_bytes_per_s=self.link_bytes_per_s * number,
            price=None if self.price is None else self.price * number,
        )


_FIELDS: Final = tuple(
    each.name for each in fields(Device) if each.name not in ("name", "origin", "bandwidth_share", "compute_share")
)
_OPTIONAL: Final = ("price", "step_overhead_s", "choice_overhead_s")
_MAY_BE_ZERO: Final = ("link_bytes_per_s", *_OPTIONAL)


@cache
def published_devices() -> tuple[Device, ...]:
    """The devices of devices.toml."""
    text = files(__package__).joinpath("devices.toml").read_text()
    return tuple(_device(name, entry, None, "published") for name, entry in tomllib.loads(text).items())


def with_own_devices(text: str) -> tuple[Device, ...]:
    """The published devices, changed and extended by a user's TOML: a table per device, of the same fields.

    A known device needs only the fields that differ, such as ``price``. Raises ``DeviceFault``.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DeviceFault(str(error), "the file is not TOML") from None
    devices = {device.name: device for device in published_devices()}
    for name, entry in tables.items():
        if not isinstance(entry, Mapping):
            raise DeviceFault(f"write a table for each device: [{name}]", name)
        devices[name] = _device(name, entry, devices.get(name), "file")
    return tuple(devices.values())


def devices_named(devices: Iterable[Device], name: str) -> tuple[Device, ...]:
    """The device of this name, or else those whose names begin with it: "h100" is both. Raises ``DeviceFault``."""
    listed = tuple(devices)
    chosen = tuple(each for each in listed if each.name == name) or tuple(
        each for each in listed if each.name.startswith(f"{name}_")
    )
    if not chosen:
        known = ", ".join(each.name for each in listed)
        raise DeviceFault(f"{name!r} is unknown; known are {known}", "device")
    return chosen


def _device(name: str, entry: Mapping[str, Any], known: Device | None, origin: str) -> Device:
    if unknown := sorted(entry.keys() - set(_FIELDS)):
        raise DeviceFault(f"there is no such field; there are {', '.join(_FIELDS)}", f"{name}.{unknown[0]}")
    for field, value in entry.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < 1e20 or (value == 0 and field in _MAY_BE_ZERO)):
            raise DeviceFault("write a number above 0", f"{name}.{field}")
    if known is not None:
        # The rates stay published where a user has only a price of their own.
        return replace(known, **entry, origin=known.origin if entry.keys() <= {"price"} else origin)
    if missing := [field for field in _FIELDS if field not in entry and field not in _OPTIONAL]:
        raise DeviceFault("a device that is not published needs it", f"{name}.{missing[0]}")
    return Device(name=name, **entry, origin=origin)

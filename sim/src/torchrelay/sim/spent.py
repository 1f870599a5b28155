"""Devices and host memory that a run uses over time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torchrelay.sim.events import EventQueue


@dataclass
class Spent:
    """Device seconds from a load order until the slot is free again, and bytes of packs in RAM over time."""

    device_s: float = 0.0
    ram_byte_s: float = 0.0
    num_loads: int = 0

    def since(self, begin: Spent) -> Spent:
        return Spent(
            self.device_s - begin.device_s, self.ram_byte_s - begin.ram_byte_s, self.num_loads - begin.num_loads
        )


@dataclass
class Meter:
    """Measures what a run uses."""

    events: EventQueue
    spent: Spent = field(default_factory=Spent)
    _ram_bytes: int = 0
    _ram_at: float = 0.0

    def __post_init__(self) -> None:
        self._ram_at = self.events.now

    def change_ram(self, change_bytes: int) -> None:
        """Adds ``change_bytes`` to the bytes held in RAM from now on."""
        passed_s, self._ram_at = self.events.now - self._ram_at, self.events.now
        self.spent.ram_byte_s += passed_s * self._ram_bytes
        self._ram_bytes += change_bytes

    def until_now(self, held_device_s: float) -> Spent:
        """Usage until now, with ``held_device_s`` of slots that are still held."""
        self.change_ram(0)
        return replace(self.spent, device_s=self.spent.device_s + held_device_s)

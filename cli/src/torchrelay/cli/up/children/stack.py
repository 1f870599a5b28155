"""The children of an embedded install, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrelay.cli.up.children.child import ChildSpec


@dataclass(frozen=True, slots=True)
class Stack:
    """The children in groups, each group asked by those after it: brokers, store, scheduler, workers, gateway.

    The brokers start first, then all services at once (they wait for each other). A group is stopped when all groups
    behind it are.
    """

    groups: tuple[tuple[ChildSpec, ...], ...]
    endpoints: dict[str, str]
    arena: Path | None = None  # shared memory to be gone at the end
    http_port: int = 0
    taken_http_port: int = 0  # the one that would have been taken, had it been free

    @property
    def waves(self) -> tuple[tuple[ChildSpec, ...], ...]:
        """What starts together; a wave begins when the one before it is ready."""
        brokers, *services = self.groups
        return (brokers, tuple(spec for group in services for spec in group))

    @property
    def specs(self) -> tuple[ChildSpec, ...]:
        return tuple(spec for group in self.groups for spec in group)

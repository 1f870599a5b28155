"""First copies of systems that start with all weights in RAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrelay.sim.scenario import Fleet, ServedModel


def all_everywhere(fleet: Fleet, models: Sequence[ServedModel]) -> tuple[Fleet, dict[int, list[str]]]:
    """Places every pack into the RAM of every host. Returns the fleet with enough RAM for it, too."""
    large = replace(fleet, arena_bytes=max(fleet.arena_bytes, sum(model.pack_bytes for model in models)))
    return large, {number: [model.name for model in models] for number in range(fleet.num_hosts)}

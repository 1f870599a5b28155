"""The log of the policy's inputs, to replay what a scheduler decided: JSON, one line each.

The first line holds what a policy starts from, each other line an input and its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Effects
from torchrelay.scheduler.policy.inputs import Input
from torchrelay.scheduler.policy.policy import Policy


class PolicyStart(msgspec.Struct, frozen=True):
    """Everything a policy depends on besides its inputs."""

    config: PolicyConfig
    started_at: float
    id_prefix: str  # unique to this scheduler: instance ids must not repeat after a restart

    def policy(self) -> Policy:
        numbers = count(1)
        return Policy(self.config, lambda: f"{self.id_prefix}-{next(numbers):06d}", self.started_at)


class _Entry(msgspec.Struct, frozen=True):
    now: float
    input: Input


_LOG_ENCODER = msgspec.json.Encoder()  # keeps the order of mappings: decisions may follow it
_EFFECTS_ENCODER = msgspec.json.Encoder(order="deterministic")
_USE_OTHER = "use the release of Torchrelay that recorded the log"


class InputRecorder:
    """Writes each input before it is applied, so that the log ends with the one that crashed the policy."""

    def __init__(self, log: BinaryIO, start: PolicyStart) -> None:
        self._log = log
        self._write(start)

    def record(self, input_: Input, now: float) -> None:
        self._write(_Entry(now, input_))

    def _write(self, line: PolicyStart | _Entry) -> None:
        self._log.write(_LOG_ENCODER.encode(line) + b"\n")


class Step(NamedTuple):
    """An input of a log, applied once more; ``policy``: after it."""

    policy: Policy
    input: Input
    now: float
    effects: Effects


def steps(path: Path) -> Iterator[Step]:
    """Raises ``msgspec.DecodeError`` for a line that is not of a log, or settings and inputs that this release does not
    know.
    """
    entries = msgspec.json.Decoder(_Entry)
    with path.open("rb") as log:
        first = log.readline()
        start = msgspec.json.decode(first, type=PolicyStart)
        if unknown := msgspec.json.decode(first)["config"].keys() - {each.name for each in fields(PolicyConfig)}:
            names = ", ".join(sorted(unknown))
            raise msgspec.ValidationError(f"config has {names}: {_USE_OTHER}")
        policy = start.policy()
        for line in log:
            try:
                entry = entries.decode(line)
            except msgspec.ValidationError as error:
                raise msgspec.ValidationError(f"{error}: {_USE_OTHER}") from error
            yield Step(policy, entry.input, entry.now, policy.apply(entry.input, entry.now))


def replay(path: Path) -> Iterator[bytes]:
    """The effects of each logged input, as a line of JSON without its end; raises as ``steps`` does."""
    return (encode_effects(step.effects) for step in steps(path))


def encode_effects(effects: Effects) -> bytes:
    """The same bytes in every process: sets and the keys of mappings are sorted."""
    return _EFFECTS_ENCODER.encode(effects)

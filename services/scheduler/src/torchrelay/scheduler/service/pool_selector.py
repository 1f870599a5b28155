"""The pool that the metadata of a KEDA trigger selects, and the slots that it should have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torchrelay.common.errors import InvalidRequest
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Role

DEVICES: Final = "numDevices"
ROLE: Final = "role"
_ROLES: Final = {"both": None, **{role.name.lower(): role for role in Role}}
_COUNT: Final = re.compile("[1-9][0-9]{0,3}")
# KEDA reads these itself and passes them on.
_OF_KEDA: Final = frozenset(("scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile"))
_MAX_SHOWN: Final = 64  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class PoolSelector:
    """``num_devices`` of each slot; ``role``: of workers that can play no other, None: of all workers."""

    num_devices: int
    role: Role | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> PoolSelector:
        """Raises ``InvalidRequest`` naming the key."""
        for key in sorted(metadata.keys() - _OF_KEDA - {DEVICES, ROLE}):
            raise _invalid(
                key, f"{key[:_MAX_SHOWN]!r} is not a key of this scaler, whose keys are {DEVICES} and {ROLE}"
            )
        devices, role = metadata.get(DEVICES, ""), metadata.get(ROLE, "both")
        if not _COUNT.fullmatch(devices):
            given = f"is {devices[:_MAX_SHOWN]!r}" if DEVICES in metadata else "is missing"
            raise _invalid(DEVICES, f'{DEVICES} {given}; give the number of devices of each worker, such as "1"')
        if role not in _ROLES:
            known = ", ".join(_ROLES)
            raise _invalid(ROLE, f"{ROLE} is {role[:_MAX_SHOWN]!r}; give the part that the workers play: {known}")
        return cls(int(devices), _ROLES[role])

    def num_wanted(self, state: State) -> int | None:
        """Slots that the pool should have; None until the pools were evaluated."""
        if state.pools_evaluated_at is None:
            return None
        if self.role is None:
            target = state.pool_targets.get(self.num_devices)
        else:
            target = state.role_targets.get((self.num_devices, self.role))
        return target.num_wanted if target is not None else 0


def _invalid(key: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=f"scalerMetadata.{key}")

"""The parts of the platform that the gateway calls, as its errors name them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.common.rpc import error_from_rpc

_SAID_BY_THE_PEER = "torchrelay-code"  # trailing metadata of an error that the peer itself raised
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class Peer:
    """One part: ``name`` is what people call it, ``setting`` the variable that says where it is."""

    name: str
    address: str
    setting: str

    def error(self, error: grpc.aio.AioRpcError) -> TorchrelayError:
        """What the peer raised; ``Unavailable`` with its name, address and setting when it could not be asked."""
        is_its_own = any(key == _SAID_BY_THE_PEER for key, _ in error.trailing_metadata() or ())
        if is_its_own or error.code() not in _AWAY:
            return error_from_rpc(error)
        return self.away()

    def away(self) -> Unavailable:
        return Unavailable(f"the {self.name} at {self.address} ({self.setting}) cannot be reached")


def store_at(address: str) -> Peer:
    return Peer("param-store", address, "TORCHRELAY_STORE_ADDRESS")


def scheduler_at(address: str) -> Peer:
    return Peer("scheduler", address, "TORCHRELAY_SCHEDULER_ADDRESS")

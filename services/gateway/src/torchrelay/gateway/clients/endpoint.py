"""The parts of the platform that the gateway calls, as its errors name them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.common.net.rpc import error_from_rpc

_SERVICE_ERROR_KEY = "torchrelay-code"  # trailing metadata of an error that the peer itself raised
_UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """One part: ``name`` is what people call it, ``setting`` the variable that says where it is."""

    name: str
    address: str
    setting: str

    def error(self, error: grpc.aio.AioRpcError) -> TorchrelayError:
        """What the peer raised; ``Unavailable`` with its name, address and setting when it could not be asked."""
        is_its_own = any(key == _SERVICE_ERROR_KEY for key, _ in error.trailing_metadata() or ())
        if is_its_own or error.code() not in _UNREACHABLE_CODES:
            return error_from_rpc(error)
        return self.unreachable()

    def unreachable(self) -> Unavailable:
        return Unavailable(f"the {self.name} at {self.address} ({self.setting}) cannot be reached")


def param_store_endpoint(address: str) -> ServiceEndpoint:
    return ServiceEndpoint("param-store", address, "TORCHRELAY_STORE_ADDRESS")


def scheduler_endpoint(address: str) -> ServiceEndpoint:
    return ServiceEndpoint("scheduler", address, "TORCHRELAY_SCHEDULER_ADDRESS")

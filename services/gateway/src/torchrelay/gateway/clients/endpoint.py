"""The services that the gateway calls, and their names in errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.common.net.rpc.errors import error_from_rpc, is_from_peer

T = TypeVar("T")
_UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """A service; ``setting`` is the environment variable with its address."""

    name: str
    address: str
    setting: str

    def error(self, error: grpc.aio.AioRpcError) -> TorchrelayError:
        """The error the peer raised, or ``Unavailable`` with its name, address and setting if it was unreachable."""
        return self.unreachable() if self.is_unreachable(error) else error_from_rpc(error)

    @staticmethod
    def is_unreachable(error: grpc.aio.AioRpcError) -> bool:
        """Whether the call failed without an error of the peer."""
        return not is_from_peer(error) and error.code() in _UNREACHABLE_CODES

    @contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Raises ``error(...)`` for the gRPC errors of the block."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.error(error) from error

    async def answered(self, step: Awaitable[T], limit_s: float) -> T:
        """The result of a step of a call. Raises ``Unavailable`` if it takes longer: the service hangs."""
        try:
            async with asyncio.timeout(limit_s):
                return await step
        except TimeoutError:
            raise self.silent() from None

    def unreachable(self) -> Unavailable:
        return Unavailable(f"the {self.name} at {self.address} ({self.setting}) cannot be reached")

    def silent(self) -> Unavailable:
        """The error of a service that takes connections and sends nothing: its process hangs."""
        return Unavailable(f"the {self.name} at {self.address} ({self.setting}) does not answer")


def param_store_endpoint(address: str) -> ServiceEndpoint:
    return ServiceEndpoint("param-store", address, "TORCHRELAY_STORE_ADDRESS")


def scheduler_endpoint(address: str) -> ServiceEndpoint:
    return ServiceEndpoint("scheduler", address, "TORCHRELAY_SCHEDULER_ADDRESS")

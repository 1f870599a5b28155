"""An unreachable service is named with address and setting; its own errors are passed on."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from torchrelay.common.errors import NotFound, TorchrelayError, Unavailable
from torchrelay.gateway.clients.endpoint import param_store_endpoint

AWAY = "the param-store at 10.0.0.7:7103 (TORCHRELAY_STORE_ADDRESS) cannot be reached"


def failed(code: grpc.StatusCode, *trailing: tuple[str, str]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailing), details="its words")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (failed(grpc.StatusCode.UNAVAILABLE), Unavailable, AWAY),
        (failed(grpc.StatusCode.DEADLINE_EXCEEDED), Unavailable, AWAY),
        (failed(grpc.StatusCode.UNAVAILABLE, ("torchrelay-code", "unavailable")), Unavailable, "its words"),
        (failed(grpc.StatusCode.NOT_FOUND, ("torchrelay-code", "not_found")), NotFound, "its words"),
        (failed(grpc.StatusCode.INTERNAL), TorchrelayError, "its words"),
    ],
)
def test_error_names_the_peer_or_the_endpoint(error: AioRpcError, kind: type[TorchrelayError], message: str) -> None:
    made = param_store_endpoint("10.0.0.7:7103").error(error)
    assert (type(made), made.message) == (kind, message)

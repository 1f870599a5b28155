"""Serving single methods of a control service, for tests that need no more of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from torchrelay.common.net.rpc.server import RpcServer


def serve(
    server: RpcServer, path: str, behaviour: Callable[..., AsyncIterator[Any]], parse: Callable[..., Any]
) -> None:
    """Serves one method of a control service that the tests need no more of."""
    service, _, method = path.partition("/")
    make: Any = grpc.unary_stream_rpc_method_handler if method == "ReadFile" else grpc.stream_stream_rpc_method_handler
    handler = make(
        behaviour, request_deserializer=parse, response_serializer=lambda message: message.SerializeToString()
    )
    listed = grpc.method_handlers_generic_handler(f"torchrelay.control.v1.{service}", {method: handler})
    server.server.add_generic_rpc_handlers((listed,))

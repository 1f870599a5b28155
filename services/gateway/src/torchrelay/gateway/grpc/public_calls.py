"""The bounds of calls of the public gRPC API: their key, their messages and what they write.

Methods are registered as if their request were a stream: grpcio then calls them when the metadata has arrived, and
the message is received only after the key has been checked, and in the tenant's turn. It is received as bytes, because
grpcio ends a call whose message it cannot decode with an internal error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from torchrelay.common.errors import DeadlineExceeded, InvalidRequest
from torchrelay.common.net.rpc.errors import status_of
from torchrelay.gateway.core import Principal
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.interfaces import Authenticator
from torchrelay.gateway.limits.connection_shares import ConnectionShares

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_MESSAGES_AWAITED = 4  # that take the whole time limit, before a call's own; else silent calls delay it forever


class PublicCalls:
    """``message_timeout_s``: how long a message may take to arrive. ``answer_silence_s``: how long a client may take
    nothing of its answer.
    """

    def __init__(
        self, keys: Authenticator, shares: ConnectionShares, message_timeout_s: float, answer_silence_s: float
    ) -> None:
        self.shares = shares
        self._keys = keys
        self._message_timeout_s = message_timeout_s
        self._answer_silence_s = answer_silence_s

    async def authenticate(self, context: Context) -> Principal:
        metadata = context.invocation_metadata() or ()
        key = next((value for name, value in metadata if name == "authorization"), None)
        return await self._keys.authenticate(key.decode("latin-1") if isinstance(key, bytes) else key)

    @contextmanager
    def stream_held(self, principal: Principal) -> Iterator[None]:
        """Holds a call with several messages, which counts as a request too. Raises as ``Shares.take`` does."""
        with self.shares.requests.held(principal.tenant_id), self.shares.streams.held(principal.tenant_id):
            yield

    async def receive(self, context: Context, principal: Principal) -> bytes:
        """The encoded request. gRPC buffers 64 KiB of it; a longer message arrives in the tenant's turn."""
        # A message first waits for the tenant's other messages, then has a time limit of its own.
        try:
            async with (
                asyncio.timeout(_MESSAGES_AWAITED * self._message_timeout_s),
                self.shares.messages.turn(principal.tenant_id),
            ):
                message = await self.receive_next(context)
        except TimeoutError:
            raise self._late() from None
        if message is None:
            raise InvalidRequest("the call has no message")
        return message

    async def receive_next(self, context: Context) -> bytes | None:
        """The next message of a call, or None. A call with several holds a stream of its tenant's share."""
        try:
            async with asyncio.timeout(self._message_timeout_s):
                # By the iterator, grpcio would keep it to the end of the call, and beyond.
                message: bytes | object = await context.read()
        except TimeoutError:
            raise self._late() from None
        return message if isinstance(message, bytes) else None  # grpc.aio.EOF

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the message did not arrive within {self._message_timeout_s:g} s")

    async def write(self, context: Context, message: Any) -> None:
        """Raises ``ClientDisconnected`` if the client takes nothing."""
        try:
            async with asyncio.timeout(self._answer_silence_s):
                await context.write(message)
        except TimeoutError:
            raise ClientDisconnected from None

    async def abort_untaken(self, context: Context) -> None:
        """Ends a call whose client takes nothing of its answer."""
        message = f"nothing of the answer was taken for {self._answer_silence_s:g} s (setting answer_silence_s)"
        # grpcio cannot reset a call: this waits until the client reads on or leaves, in its tenant's share.
        await context.abort(*status_of(DeadlineExceeded(message)))

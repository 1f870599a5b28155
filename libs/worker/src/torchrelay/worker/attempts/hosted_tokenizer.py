"""The tokenizer of the hosted model, which a worker needs only to match stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc
from blake3 import blake3
from tokenizers import Tokenizer

from torchrelay.common.errors import DataCorrupted
from torchrelay.common.net.rpc import error_from_rpc
from torchrelay.common.tokens.stop_strings import StopChecker
from torchrelay.common.tokens.tokenizer import load_tokenizer
from torchrelay.control.v1 import param_store_pb2 as pb

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub  # exists in the stubs only

READ_TIMEOUT_S = 10.0  # of a small file, from this host


class HostedTokenizer:
    """The tokenizer of the hosted model, read on first use."""

    def __init__(self, read: Callable[[str], Awaitable[bytes]]) -> None:
        """``read`` gives the verified ``tokenizer.json`` of a digest."""
        self.read = read
        self._digest = ""
        self._tokenizer: Tokenizer | None = None
        self._lock = asyncio.Lock()

    async def checkers(
        self, digest: str, stop_strings: list[str], forced: dict[int, list[int]]
    ) -> dict[int, StopChecker]:
        """One checker per choice, advanced past its forced output. Raises ``TorchrelayError``."""
        if not stop_strings:
            return {}
        tokenizer = await self._get(digest)
        checkers = {choice: StopChecker(tokenizer, stop_strings) for choice in forced}
        for choice, tokens in forced.items():
            for token_id in tokens:
                checkers[choice].step(token_id)
        return checkers

    async def _get(self, digest: str) -> Tokenizer:
        async with self._lock:
            tokenizer = self._tokenizer
            if tokenizer is None or self._digest != digest:
                encoded = await self.read(digest)
                tokenizer = self._tokenizer = await asyncio.to_thread(load_tokenizer, encoded)
                self._digest = digest
            return tokenizer


async def read_file(store: ParamStoreAsyncStub, digest: str) -> bytes:
    """A tokenizer's file from this host's store, verified. Raises ``TorchrelayError``."""
    try:
        request = pb.ReadFileRequest(digest=digest)
        encoded = b"".join([part.data async for part in store.ReadFile(request, timeout=READ_TIMEOUT_S)])
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    if blake3(encoded).hexdigest() != digest:
        raise DataCorrupted("the store's tokenizer does not match its digest", field="tokenizer.json")
    return encoded

"""The tokenizer of the hosted model, which a worker needs only to match stop strings and to follow grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import grpc
from blake3 import blake3
from cachetools import LRUCache

from torchrelay.common.errors import DataCorrupted, InvalidRequest, Unavailable
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.common.tokens.grammar import Grammar, GrammarCompiler
from torchrelay.common.tokens.stop_strings import StopChecker
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.common.tokens.tokenizer import load_decoder
from torchrelay.control.v1 import param_store_pb2 as pb

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub  # exists in the stubs only

READ_TIMEOUT_S = 10.0  # for a small file from this host
LOAD_TIMEOUT_S = 30.0
MAX_GRAMMARS: Final = 32  # compiled, of the hosted model: some hold megabytes
TOKENS_PER_TURN = 128  # of forced output: a millisecond of work between turns of the event loop


class HostedTokenizer:
    """The tokenizer of the hosted model, read on first use. If it cannot be loaded, the reason is kept."""

    def __init__(self, read: Callable[[str], Awaitable[bytes]], load_timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """``read`` returns the verified ``tokenizer.json`` of a digest."""
        self.read = read
        self._load_timeout_s = load_timeout_s
        self._digest = ""
        self._loaded: TokenDecoder | InvalidRequest | None = None
        self._compiler: GrammarCompiler | None = None
        self._grammars: LRUCache[str, Grammar] = LRUCache(MAX_GRAMMARS)
        self._lock = asyncio.Lock()
        self._compiling = asyncio.Lock()

    async def checkers(
        self,
        digest: str,
        stop_strings: list[str],
        prompt_end: list[int],
        forced: dict[int, list[int]],
        min_tokens: int = 0,
    ) -> dict[int, StopChecker]:
        """A checker per choice, advanced past its forced output. Raises ``TorchrelayError``."""
        if not stop_strings:
            return {}
        decoder = await self._get(digest)
        checkers = {choice: StopChecker(decoder, stop_strings, prompt_end, min_tokens) for choice in forced}
        steps = [(checkers[choice], token_id) for choice, tokens in forced.items() for token_id in tokens]
        for begin in range(0, len(steps), TOKENS_PER_TURN):
            for checker, token_id in steps[begin : begin + TOKENS_PER_TURN]:
                checker.step(token_id)
            await asyncio.sleep(0)
        return checkers

    async def grammar(self, digest: str, source: str) -> Grammar:
        """The compiled grammar. Raises ``TorchrelayError``."""
        decoder = await self._get(digest)
        async with self._compiling:
            if self._compiler is None or self._compiler.decoder is not decoder:
                self._compiler = await asyncio.to_thread(GrammarCompiler, decoder)
                self._grammars = LRUCache(MAX_GRAMMARS)
            compiler, grammars = self._compiler, self._grammars
        if (grammar := grammars.get(source)) is not None:
            return grammar
        compiled = await asyncio.to_thread(compiler.compile, source)  # beside the grammars of others
        return grammars.setdefault(source, compiled)

    async def _get(self, digest: str) -> TokenDecoder:
        try:
            async with asyncio.timeout(self._load_timeout_s), self._lock:
                if self._loaded is None or self._digest != digest:
                    self._loaded, self._digest = await self._load(digest), digest
                loaded = self._loaded
        except TimeoutError:
            message = f"the model's tokenizer could not be loaded within {self._load_timeout_s:g} s"
            raise Unavailable(message, field="tokenizer.json") from None
        if isinstance(loaded, InvalidRequest):
            raise InvalidRequest(loaded.message, field=loaded.field)
        return loaded

    async def _load(self, digest: str) -> TokenDecoder | InvalidRequest:
        encoded = await self.read(digest)
        try:
            return await asyncio.to_thread(load_decoder, encoded)
        except InvalidRequest as refused:
            return refused


async def read_file(store: ParamStoreAsyncStub, digest: str, timeout_s: float = READ_TIMEOUT_S) -> bytes:
    """A file of a version from this host's store, verified. Raises ``TorchrelayError``."""
    parts, hasher = list[bytes](), blake3()
    try:
        async for part in store.ReadFile(pb.ReadFileRequest(digest=digest), timeout=timeout_s):
            hasher.update(part.data)  # a part at a time: an adapter has hundreds of megabytes
            parts.append(part.data)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    if hasher.hexdigest() != digest:
        raise DataCorrupted(f"the file that the store gives for {digest} does not match this digest")
    return b"".join(parts)

"""uvicorn with an application that only sends events, for the minimal cost of streaming.

    python -m bench.streaming.bare_server TOKENS

Prints its port. Answers every request with TOKENS events as large as the gateway's, each in its own iteration of the
event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvloop

from torchrelay.gateway.http.server import http_server

EVENT = (
    b'data: {"id":"req-0000000000000000000000","object":"text_completion","created":1700000000,"model":"bench/echo",'
    b'"choices":[{"index":0,"text":"torch","logprobs":null,"finish_reason":null}]}\n\n'
)
END = b"data: [DONE]\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
Message = MutableMapping[str, Any]


class Application:
    def __init__(self, num_events: int) -> None:
        self._num_events = num_events

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        for _ in range(self._num_events):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(0)  # otherwise the event loop would merge the events into one write
        await send({"type": "http.response.body", "body": END})


async def serve(num_events: int) -> None:
    async with http_server(Application(num_events), "127.0.0.1", 0, 1.0) as server:
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))

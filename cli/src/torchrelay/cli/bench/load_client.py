"""The client of a load: streamed completions, each with its times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import httpx

from torchrelay.cli.api.client import connection_options
from torchrelay.cli.bench.answered import Answered, AnswerStream
from torchrelay.cli.bench.bodies import Prompts, completion_body
from torchrelay.cli.errors import ApiError, api_error

if TYPE_CHECKING:
    from torchrelay.cli.api.access import Access

TIMEOUT_S: Final = 600.0  # without a byte; a load of a large model is quieter than its stream


@dataclass(slots=True)
class LoadClient:
    """Sends requests to ``model`` and keeps what it sees of those that ended. Times are since ``begin``."""

    access: Access
    model: str
    prompts: Prompts
    clock: Callable[[], float] = time.perf_counter
    answered: list[Answered] = field(default_factory=list)
    num_running: int = 0
    _http: httpx.AsyncClient = field(init=False)
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()
        self._http = httpx.AsyncClient(
            base_url=self.access.url,
            headers={"Authorization": f"Bearer {self.access.key}"},
            timeout=httpx.Timeout(TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None),
            **connection_options(self.access.url),
        )

    async def close(self) -> None:
        await self._http.aclose()

    def begin(self) -> None:
        """Forgets the requests before, as those of a warm-up; the load's time begins."""
        self.answered.clear()
        self._begin = self.clock()

    @property
    def now_s(self) -> float:
        return self.clock() - self._begin

    async def sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(at_s - self.now_s, 0.0))

    async def send(self, num_prompt: int, num_answer: int, due_s: float | None = None) -> Answered:
        """Sends one request, keeps and returns its times; what goes wrong is kept, not raised."""
        body = completion_body(self.model, self.prompts.prompt(num_prompt), num_answer)
        body |= {"stream_options": {"include_usage": True}}
        stream, request_id, sent_s = AnswerStream(), "", self.now_s
        self.num_running += 1
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                request_id = response.headers.get("x-request-id", "")
                if response.is_error:
                    raise api_error(await response.aread(), response.status_code)
                async for data in response.aiter_bytes():
                    stream.feed(data, self.now_s)
            error = stream.fault(num_answer)
        except ApiError as refusal:
            error = refusal.message
        except httpx.HTTPError as broken:
            error = f"the connection broke: {broken or type(broken).__name__}"
        finally:
            self.num_running -= 1
        usage = stream.usage
        answered = Answered(
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=self.now_s,
            first_s=stream.first_s,
            last_s=stream.last_s,
            gaps_s=tuple(stream.gaps_s),
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            num_output_tokens=stream.num_tokens,
            request_id=request_id,
            error=error,
        )
        self.answered.append(answered)
        return answered

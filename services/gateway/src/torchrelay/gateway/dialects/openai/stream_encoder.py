"""Token deltas as server-sent events in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.dialects.openai.replies import DONE, ReplyFormat, StreamReply, finish_reason
from torchrelay.gateway.exchange.errors import error_body
from torchrelay.gateway.exchange.logprobs import LogprobFormatter
from torchrelay.gateway.exchange.sse import comment, data_event
from torchrelay.gateway.inference.answers.parts import Part, Reasoning
from torchrelay.gateway.inference.choice_reader import Step
from torchrelay.gateway.inference.core import TokenDelta, Usage
from torchrelay.gateway.inference.pipeline import RequestSession


class SseEncoder:
    """Encodes token deltas as server-sent events."""

    def __init__(self, session: RequestSession, reply_format: ReplyFormat, reply_id: str, first_index: int) -> None:
        self.choices = session.choices()
        self._reply = StreamReply(session.request.resolved, reply_format, reply_id, first_index)
        self._logprobs = LogprobFormatter.for_session(session, is_chat=reply_format.is_chat)
        self._session = session
        self._shows_reasoning = reply_format.shows_reasoning
        self._has_annotations = self._logprobs is not None or reply_format.return_token_ids
        # Each token is an event of its content: the fast path of most streams.
        self._is_plain = not self._has_annotations and not any(choice.is_divided for choice in self.choices)
        self._unstarted = set(range(len(self.choices)))  # choices without a first event

    def keep_alive(self) -> bytes:
        return comment(self._session.request.waits_for)

    def end(self, usage: Usage) -> bytes:
        return self._reply.usage(usage) + DONE

    def failed(self, error: TorchrelayError) -> bytes:
        return data_event(error_body(error))

    def of(self, deltas: Iterable[TokenDelta]) -> bytes:
        """An event per token, preceded by a role and followed by a finish event for each choice."""
        events: list[bytes] = []
        for delta in deltas:
            choice = delta.choice
            if self._unstarted and choice in self._unstarted:
                self._unstarted.discard(choice)
                events.append(self._reply.opening(choice, self._session.echo))
            for step in self.choices[choice].read(delta):
                token_id = step.token_id
                if token_id is not None and self._is_plain:
                    events.append(self._reply.token(choice, step.content if step.parts else "", token_id, None))
                elif token_id is not None:
                    events += self._events(choice, step, token_id)
                elif delta.finish is not None:
                    events += self._last_events(choice, step, delta.finish)
        return b"".join(events)

    def _events(self, choice: int, step: Step, token_id: int) -> Iterator[bytes]:
        """The events of the parts that a token completes, of which there is at least one."""
        parts = self._shown(step.parts)
        last = parts[-1] if parts else ""
        content = last if isinstance(last, str) else ""
        yield from (self._reply.part(choice, part) for part in (parts[:-1] if content else parts))
        if content or not parts or self._has_annotations:
            logprobs = None
            if self._logprobs is not None and step.scored is not None:
                logprobs = self._logprobs.of([self._logprobs.encoded(step.scored)])
            yield self._reply.token(choice, content, token_id, logprobs)

    def _last_events(self, choice: int, end: Step, finish: FinishCause) -> Iterator[bytes]:
        reader = self.choices[choice]
        if not reader.is_divided:
            yield self._reply.finish(choice, end.content, str(finish))
            return
        yield from (self._reply.part(choice, part) for part in self._shown(end.parts))
        yield self._reply.finish(choice, "", finish_reason(finish, reader.num_calls))

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts if self._shows_reasoning else [part for part in parts if not isinstance(part, Reasoning)]

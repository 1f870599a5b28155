"""The output of a response: its items, as the parts of an answer arrive, and the events about them."""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.gateway.dialects.responses.events import Event
from torchrelay.gateway.dialects.responses.open_items import (
    CallItem,
    CustomCallItem,
    Item,
    MessageItem,
    OpenItem,
    ReasoningItem,
)
from torchrelay.gateway.dialects.responses.tools import ToolName
from torchrelay.gateway.inference.answers.parts import CallArguments, CallBegin, Part, Reasoning


class Output:
    """The items so far. ``tool_names``: by the name as the model knows it."""

    def __init__(self, tool_names: Mapping[str, ToolName]) -> None:
        self._waiting: list[bytes] = []  # logprobs of tokens whose text has not come out of the parser
        self.items: list[Item] = []  # without the open one
        self._tool_names = tool_names
        self._open: OpenItem | None = None

    def note(self, logprobs: bytes) -> None:
        """Notes the logprobs of a token, whose parts follow."""
        self._waiting.append(logprobs)

    def add(self, part: Part) -> list[Event]:
        """The events about a further part of the answer."""
        if not part:
            return []
        tokens, self._waiting = self._waiting, []
        match part:
            case str():
                if isinstance(self._open, MessageItem):
                    return self._open.add(part, tokens)
                item = MessageItem(len(self.items) + (self._open is not None))
                return [*self._end("completed"), *self._begin(item), *item.add(part, tokens)]
            case Reasoning(text):
                return self._in(ReasoningItem, text)
            case CallBegin():
                return [*self._end("completed"), *self._begin(self._call(part))]
            case CallArguments():
                return [] if self._open is None else self._open.add(part.text)

    def end(self, status: str) -> list[Event]:
        """The last events. ``status``: of an item that ends with the answer."""
        begun = [] if self.items or self._open else self._begin(MessageItem(0))
        return [*begun, *self._end(status)]

    def _in(self, kind: type[ReasoningItem], text: str) -> list[Event]:
        """Adds text to the open item, if it is of this kind, or else to a new one."""
        if isinstance(self._open, kind):
            return self._open.add(text)
        ended = self._end("completed")
        item = kind(len(self.items))
        return [*ended, *self._begin(item), *item.add(text)]

    def _call(self, part: CallBegin) -> CallItem:
        name = self._tool_names.get(part.name) or ToolName(part.name)
        return (CustomCallItem if name.is_custom else CallItem)(len(self.items), part, name)

    def _begin(self, item: OpenItem) -> list[Event]:
        self._open = item
        return item.begin()

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self._open = None
        self.items.append(item)
        return events

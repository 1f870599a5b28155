"""The items of a response's output that go on, and the events about them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from torchrelay.gateway.dialects.responses.events import Event, event_of, underscored_id
from torchrelay.gateway.dialects.responses.tools import INPUT, ToolName
from torchrelay.gateway.exchange.sse import encode_json
from torchrelay.gateway.inference.answers.parts import CallBegin

Item: TypeAlias = dict[str, Any]


class OpenItem(ABC):
    """An item to which text is added. ``index``: its place in the output."""

    id_prefix: ClassVar[str]
    text_events: ClassVar[str]  # the name that the events about its text have in common
    text_field: ClassVar[str]  # of the event about the whole text

    def __init__(self, index: int) -> None:
        self.id = underscored_id(self.id_prefix)
        self._index = index
        self._pieces: list[str] = []
        self._delta_type = f"response.{self.text_events}.delta".encode()
        self._delta_head = encode_json(self._text_fields)[1:-1] + b',"delta":'

    @property
    def _text_fields(self) -> dict[str, Any]:
        """The fields that the events about its text have in common."""
        return {"item_id": self.id, "output_index": self._index}

    @abstractmethod
    def item(self, text: str, status: str) -> Item:
        """The item with this text; the status tells whether it goes on."""

    def begin(self) -> list[Event]:
        return [event_of("response.output_item.added", output_index=self._index, item=self.item("", "in_progress"))]

    def add(self, text: str) -> list[Event]:
        self._pieces.append(text)
        return [Event(self._delta_type, self._delta_head + encode_json(text))]

    def end(self, status: str) -> tuple[Item, list[Event]]:
        """The finished item. ``status``: of an item that ends here with the answer."""
        text = "".join(self._pieces)
        item = self.item(text, status)
        return item, [
            event_of(f"response.{self.text_events}.done", **self._text_fields, **{self.text_field: text}),
            event_of("response.output_item.done", output_index=self._index, item=item),
        ]


class _TextItem(OpenItem):
    """An item whose text is in a part of its content."""

    text_field = "text"

    @property
    def _text_fields(self) -> dict[str, Any]:
        return {**super()._text_fields, "content_index": 0}

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """The part."""

    def begin(self) -> list[Event]:
        return [*super().begin(), self._part_event("added", "")]

    def end(self, status: str) -> tuple[Item, list[Event]]:
        item, [text_done, item_done] = super().end(status)
        return item, [text_done, self._part_event("done", "".join(self._pieces)), item_done]

    def _part_event(self, name: str, text: str) -> Event:
        place = {"item_id": self.id, "output_index": self._index, "content_index": 0}
        return event_of(f"response.content_part.{name}", **place, part=self.part(text))

    def _content(self, text: str, status: str) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self.part(text)]


class MessageItem(_TextItem):
    """A message. Its tokens have logprobs if the request asks for them."""

    id_prefix, text_events = "msg", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._tokens: list[bytes] = []  # the logprobs of each token of the text so far, if requested

    def add(self, text: str, tokens: Sequence[bytes] = ()) -> list[Event]:
        self._tokens += tokens
        self._pieces.append(text)
        listed = b"[%s]" % b",".join(tokens)
        return [Event(self._delta_type, b'%s%s,"logprobs":%s' % (self._delta_head, encode_json(text), listed))]

    def end(self, status: str) -> tuple[Item, list[Event]]:
        item, [text_done, *others] = super().end(status)
        listed = encode_json(self._logprobs)
        return item, [Event(text_done.type, b'%s,"logprobs":%s' % (text_done.fields, listed)), *others]

    @property
    def _logprobs(self) -> Any:
        return msgspec.Raw(b"[%s]" % b",".join(self._tokens)) if self._tokens else []

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def item(self, text: str, status: str) -> Item:
        head = {"id": self.id, "type": "message", "status": status, "role": "assistant"}
        return {**head, "content": self._content(text, status)}


class ReasoningItem(_TextItem):
    id_prefix, text_events = "rs", "reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def item(self, text: str, status: str) -> Item:
        head = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        return {**head, "content": self._content(text, status)}


class CallItem(OpenItem):
    """A call of a function."""

    id_prefix, text_events, text_field = "fc", "function_call_arguments", "arguments"
    kind: ClassVar[str] = "function_call"

    def __init__(self, index: int, call: CallBegin, name: ToolName) -> None:
        super().__init__(index)
        self._call, self._name = call, name

    def item(self, text: str, status: str) -> Item:
        head = {"id": self.id, "type": self.kind, "status": status, "call_id": self._call.id, "name": self._name.name}
        if self._name.namespace is not None:
            head["namespace"] = self._name.namespace
        return {**head, self.text_field: text}

    @property
    def _arguments(self) -> str:
        """The arguments as the model has written them so far."""
        return "".join(self._pieces)

    def end(self, status: str) -> tuple[Item, list[Event]]:
        return super().end("completed" if _is_json(self._arguments) else status)


class CustomCallItem(CallItem):
    """A call of a custom tool. Its text, which the model writes as JSON, is known at its end."""

    id_prefix, text_events, text_field = "ctc", "custom_tool_call_input", "input"
    kind = "custom_tool_call"

    def __init__(self, index: int, call: CallBegin, name: ToolName) -> None:
        super().__init__(index, call, name)
        self._written: list[str] = []

    @property
    def _arguments(self) -> str:
        return "".join(self._written)

    def add(self, text: str) -> list[Event]:
        self._written.append(text)
        return []

    def end(self, status: str) -> tuple[Item, list[Event]]:
        delta = super().add(_input_of(self._arguments))
        item, events = super().end(status)
        return item, [*delta, *events]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _input_of(arguments: str) -> str:
    """The text that a model passes to a custom tool; all that it wrote, if that has another form."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = given.get(INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments

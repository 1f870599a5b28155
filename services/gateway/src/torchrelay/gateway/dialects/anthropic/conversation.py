"""The messages of a request in Anthropic's format, as messages for a chat template. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.contents import remark
from torchrelay.gateway.inference.core import ChatMessage

_ROLES: Final = ("user", "assistant", "system")
_THOUGHTS: Final = ("thinking", "redacted_thinking")  # blocks of earlier answers
_SERVER_CALLS: Final = ("server_tool_use", "mcp_tool_use")  # calls of tools that another server ran


class Block(msgspec.Struct):
    """A part of a message. Each type uses some of the fields."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    title: str | None = None
    source: Any = None
    tool_name: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Block]


class Conversation:
    """Messages, as they are added, and what their texts refer to.

    As in Anthropic's API, turns of one role that follow each other are one turn. What the system says before the first
    answer is a part of its message; later it is the user's, since templates know the system at the beginning only.
    Texts are lists of parts until the end, since joining each part at once would take the square of the time.
    """

    def __init__(self, system: str | list[Block] | None) -> None:
        self.left_out: set[str] = set()  # kinds of content
        self.referenced: dict[str, None] = {}  # names of tools, in order
        self._system: list[str] = [self._text(system, "system")] if system else []
        self._messages: list[ChatMessage] = []
        self._has_answer = False
        self._late: list[str] = []  # what the system has said since the last turn, for the user's next one

    @property
    def has_turns(self) -> bool:
        return bool(self._messages)

    def messages(self) -> tuple[ChatMessage, ...]:
        self._flush_late()
        begin: list[ChatMessage] = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return (*begin, *map(_joined, self._messages))

    def add(self, message: Message, where: str) -> None:
        """Raises ``InvalidRequest`` if the message is faulty."""
        blocks = [Block("text", message.content)] if isinstance(message.content, str) else message.content
        match message.role:
            case "assistant":
                self._add_answer(blocks, where)
            case "user":
                self._add_turn(blocks, where)
            case "system":
                (self._late if self._has_answer else self._system).append(self._text(blocks, where))
            case other:
                wrong = f"{where}.role must be one of {', '.join(_ROLES)}, not {other[:40]!r}"
                raise InvalidRequest(wrong, field="messages")

    def _turn(self, role: str) -> ChatMessage:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _flush_late(self) -> None:
        """Adds what the system has said to the user's turn: after results, which follow their calls at once."""
        if self._late:
            self._turn("user")["content"] += self._late
            self._late = []

    def _add_turn(self, blocks: Sequence[Block], where: str) -> None:
        """Adds a user's turn, after a message for each result of a tool in it."""
        results = [block for block in blocks if block.type == "tool_result"]
        for block in results:
            text = self._text(block.content or "", where)
            result: ChatMessage = {"role": "tool", "content": [f"Error: {text}" if block.is_error else text]}
            self._messages.append(
                result if block.tool_use_id is None else {**result, "tool_call_id": block.tool_use_id}
            )
        self._flush_late()
        texts = [block for block in blocks if block.type != "tool_result"]
        if texts or not results:
            text = self._text(texts, where)
            if not text:
                raise InvalidRequest(f"{where} of role user must have content", field="messages")
            self._turn("user")["content"].append(text)

    def _add_answer(self, blocks: Sequence[Block], where: str) -> None:
        """Adds an earlier answer, with its calls of tools."""
        self._flush_late()
        self._has_answer = True
        message = self._turn("assistant")
        texts = [block for block in blocks if block.type not in (*_THOUGHTS, "tool_use")]
        if text := self._text(texts, where):
            message["content"].append(text)
        if thoughts := [block.thinking for block in blocks if block.type == "thinking" and block.thinking]:
            message.setdefault("reasoning_content", []).extend(thoughts)
        for block in blocks:
            if block.type == "tool_use":
                if not block.name:
                    raise InvalidRequest(f"{where} has a tool_use without a name", field="messages")
                function = {"name": block.name, "arguments": block.input or {}}
                call = {"id": block.id or "", "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)

    def _text(self, content: str | Sequence[Block] | dict[str, Any], where: str) -> str:
        if isinstance(content, str):
            return content
        if isinstance(content, dict):  # the error of a tool that another server ran
            return json.dumps(content, ensure_ascii=False)
        return "\n".join(self._text_of(block, where) for block in content)

    def _text_of(self, block: Block, where: str) -> str:
        match block:
            case Block(type="text", text=str(text)):
                return text
            case Block(type="tool_reference", tool_name=str(name)):
                self.referenced[name] = None
                return f"The tool {name} can be called now."
            case Block(type="document", source={"type": "text", "data": str(data)}):
                return data if block.title is None else f"{block.title}\n{data}"
            case Block(type="search_result", content=list(found)):
                return "\n".join((block.title or "", *(part.text or "" for part in found))).strip()
            case Block(type=kind) if kind in _SERVER_CALLS:
                return f"[called {block.name}: {json.dumps(block.input or {}, ensure_ascii=False)}]"
            case Block(type=kind) if kind.endswith("_tool_result"):
                return self._text(block.content, where) if isinstance(block.content, str) else "[result left out]"
        instead = remark(block.type, self.left_out)
        if instead is None:
            message = f"{where} has content of type {block.type[:40]!r}, which is not supported here; send text"
            raise InvalidRequest(message, field=where.partition("[")[0])
        return instead


def _joined(message: ChatMessage) -> ChatMessage:
    return {
        name: "\n".join(value) if name in ("content", "reasoning_content") else value for name, value in message.items()
    }

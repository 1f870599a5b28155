"""The input of a Responses request as messages for a chat template. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.contents import remark
from torchrelay.gateway.bodies.tools import CalledFunction, CalledTool, called_tools
from torchrelay.gateway.dialects.responses.tools import INPUT, ToolName
from torchrelay.gateway.inference.core import ChatMessage
from torchrelay.gateway.inference.parameter_ranges import MAX_MESSAGES

_ROLES: Final = ("user", "assistant", "system", "developer")
_INSTRUCTING: Final = ("system", "developer")
_TEXTS: Final = ("input_text", "output_text", "text")
# Records of tools that OpenAI's servers run, or that its models were trained on, and of shortened conversations.
_HOSTED: Final = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "tool_search_output", "compaction"),
    )
)


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """A message, a call or its result. Each type uses some of the fields."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | dict[str, Any] | None = None
    action: Any = None


def messages_of(
    given: str | Sequence[Item], instructions: str | None
) -> tuple[tuple[ChatMessage, ...], tuple[str, ...]]:
    """The messages of a conversation, begun by the instructions, and the kinds of content left out.

    Raises ``InvalidRequest``.
    """
    conversation = _Conversation(instructions)
    if isinstance(given, str):
        conversation.messages.append({"role": "user", "content": [given]})
    elif not 0 < len(given) <= MAX_MESSAGES:
        wrong = "must not be empty" if not given else f"has {len(given):,} items; at most {MAX_MESSAGES:,} are allowed"
        raise InvalidRequest(f"input {wrong}", field="input")
    else:
        for index, item in enumerate(given):
            try:
                conversation.add(item, f"input[{index}]")
            except RecursionError:
                raise InvalidRequest(f"input[{index}] is nested too deeply", field="input") from None
    if not conversation.messages:
        raise InvalidRequest("input has no message", field="input")
    return tuple(map(_joined, conversation.messages)), tuple(sorted(conversation.left_out))


class _Conversation:
    """Messages, as items are added. Their texts are lists of parts: to join each part at once would take the square of
    the time.

    A template knows fewer of them than there are items: what the system and the developer say at the beginning becomes
    a single message, as does what an assistant says and calls without a pause for results.
    """

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[ChatMessage] = []
        self.left_out: set[str] = set()
        self._call_ids: set[str] = set()
        self._thoughts: list[str] = []  # of the assistant, before its next message
        if instructions:
            self.messages.append({"role": "system", "content": [instructions]})

    def add(self, item: Item, where: str) -> None:
        match item.type or "message":
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, _given(item.arguments, f"{where}.arguments"), where)
            case "custom_tool_call":
                written = _given(item.input, f"{where}.input")
                self._add_call(item, msgspec.json.encode({INPUT: written}).decode(), where)
            case "function_call_output" | "custom_tool_call_output":
                self._add_result(item, where)
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else ()
                self._thoughts += [part.text for part in parts if part.text]
            case "item_reference":
                message = f"{where} refers to an item, and none is stored; send the item itself"
                raise InvalidRequest(message, field="input")
            case hosted if hosted in _HOSTED:
                output = None if item.output is None else self._text(item.output, where)
                record = {"action": item.action, "arguments": item.arguments, "output": output}
                if shown := {name: value for name, value in record.items() if isinstance(value, (str, dict))}:
                    self._say(f"[{hosted}: {msgspec.json.encode(shown).decode()}]")
            case other:
                message = f"{where}.type {other[:40]!r} is not supported; send messages, calls of functions and custom "
                raise InvalidRequest(message + "tools, and their outputs", field="input")

    def _add_message(self, item: Item, where: str) -> None:
        role = _given(item.role, f"{where}.role")
        if role not in _ROLES:
            message = f"{where}.role must be one of {', '.join(_ROLES)}, not {role[:40]!r}"
            raise InvalidRequest(message, field="input")
        if role == "assistant":
            self._say(self._text(item.content or "", where))
            return
        if item.content is None:
            raise InvalidRequest(f"{where} of role {role} must have content", field="input")
        text = self._text(item.content, where)
        self._thoughts.clear()  # reasoning without an answer
        if role in _INSTRUCTING and len(self.messages) == 1 and self.messages[0]["role"] in _INSTRUCTING:
            self.messages[0]["content"].append(text)
        else:
            self.messages.append({"role": role, "content": [text]})

    def _say(self, text: str) -> ChatMessage:
        """The assistant's message that ``text`` is added to."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        message = self.messages[-1]
        if text:
            message["content"].append(text)
        if self._thoughts:
            message.setdefault("reasoning_content", []).extend(self._thoughts)
            self._thoughts.clear()
        return message

    def _add_call(self, item: Item, arguments: str, where: str) -> None:
        call_id = _given(item.call_id, f"{where}.call_id")
        name = ToolName(_given(item.name, f"{where}.name"), item.namespace)
        self._call_ids.add(call_id)
        calls: list[dict[str, Any]] = self._say("").setdefault("tool_calls", [])
        calls += called_tools([CalledTool(CalledFunction(name.shown, arguments), call_id)])

    def _add_result(self, item: Item, where: str) -> None:
        call_id = _given(item.call_id, f"{where}.call_id")
        if call_id not in self._call_ids:
            message = (
                f"{where} is the output of {call_id[:80]!r}, and no earlier item calls it; repeat the call, since "
            )
            raise InvalidRequest(message + "responses are not stored", field="input")
        if item.output is None:
            raise InvalidRequest(f"{where}.output is missing", field="input")
        text = self._text(item.output, where)
        self.messages.append({"role": "tool", "content": [text], "tool_call_id": call_id})

    def _text(self, content: str | list[Part] | dict[str, Any], where: str) -> str:
        if isinstance(content, str):
            return content
        if isinstance(content, dict):
            instead = remark(str(content.get("type")), self.left_out)
            return msgspec.json.encode(content).decode() if instead is None else instead
        return "\n".join(self._part_text(part, where) for part in content)

    def _part_text(self, part: Part, where: str) -> str:
        text = part.text if part.type in _TEXTS else part.refusal if part.type == "refusal" else None
        if text is None and (text := remark(part.type, self.left_out)) is None:
            message = f"{where} has content of type {part.type[:40]!r}, which is not supported here; send text"
            raise InvalidRequest(message, field="input")
        return text


def _joined(message: ChatMessage) -> ChatMessage:
    """The message with its parts joined to texts."""
    separator = "\n\n" if message["role"] in _INSTRUCTING else "\n"
    texts = {"content": separator.join(message["content"])}
    if "reasoning_content" in message:
        texts["reasoning_content"] = "\n".join(message["reasoning_content"])
    return {**message, **texts}


def _given(value: str | None, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"{name} is missing", field="input")
    return value

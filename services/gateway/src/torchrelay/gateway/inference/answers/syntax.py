"""How a model's answers show reasoning and calls of tools. Imports nothing heavy; text processes send it."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"

CallStyle: TypeAlias = Literal[
    "json",  # ``opening``, an object with a name and arguments or a list of them, ``closing``: Hermes, Qwen
    "mistral",  # the same, or ``opening`` name [ARGS] and the object of the arguments
    "llama",  # objects at the beginning of the answer or after <|python_tag|>, separated by semicolons
    "xml",  # ``opening`` <function=NAME> <parameter=KEY> value </parameter> </function> ``closing``: Qwen3-Coder
]


class CallSyntax(msgspec.Struct, frozen=True):
    style: CallStyle
    opening: str
    closing: str = ""  # may be missing
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    id_key: str = ""  # of a number that may precede the name


class AnswerSyntax(msgspec.Struct, frozen=True):
    """``thoughts`` are the markers around the reasoning, which precedes the content."""

    calls: CallSyntax | None = None
    thoughts: tuple[str, str] | None = None
    begins_thinking: bool = False  # the prompt ends with the opening of the reasoning
    calls_alone: bool = False  # an answer is calls or content, never both: a format binds its content

    def markers(self, *, has_tools: bool) -> frozenset[str]:
        """Texts of special tokens that the parser of an answer needs to see."""
        markers = set(self.thoughts or ())
        if has_tools and self.calls is not None:
            markers |= {self.calls.opening, self.calls.closing}
            if self.calls.style == "mistral":
                markers |= {CALL_ID, ARGUMENTS}
        return frozenset(markers - {""})


PLAIN: Final = AnswerSyntax()
HERMES: Final = CallSyntax("json", "<tool_call>", "</tool_call>")
QWEN_CODER: Final = CallSyntax("xml", "<tool_call>", "</tool_call>")
SEED: Final = CallSyntax("xml", "<seed:tool_call>", "</seed:tool_call>")
MISTRAL: Final = CallSyntax("mistral", "[TOOL_CALLS]")
PHI: Final = CallSyntax("json", "<|tool_call|>", "<|/tool_call|>")
NEMOTRON: Final = CallSyntax("json", "<TOOLCALL>", "</TOOLCALL>")
COMMAND: Final = CallSyntax("json", "<|START_ACTION|>", "<|END_ACTION|>", "tool_name", ("parameters",), "tool_call_id")
LLAMA: Final = CallSyntax("llama", "<|python_tag|>")

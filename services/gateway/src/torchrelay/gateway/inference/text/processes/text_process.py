"""A text process: renders chat templates and encodes text, both with files that tenants uploaded.

Run as a script by ``process_connection.start``, with one end of a socket pair as its standard input, and never imported
by the gateway. Before the first command it drops its rights to open files or sockets, start processes, write files and
grow. The kernel kills it when a command exceeds its CPU time; the signal tells which part of the work did.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, Final

import msgspec
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Encoding, Tokenizer

from torchrelay.common.tokens.grammar import grammar_error
from torchrelay.common.tokens.tokenizer import load_tokenizer
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat
from torchrelay.gateway.inference.answers.grammars import grammar_source
from torchrelay.gateway.inference.answers.schemas import schema_fault
from torchrelay.gateway.inference.answers.syntax import PLAIN, AnswerSyntax
from torchrelay.gateway.inference.text.processes import chat_format
from torchrelay.gateway.inference.text.processes.answer_syntax import merged
from torchrelay.gateway.inference.text.processes.chat_format import ChatFormat
from torchrelay.gateway.inference.text.processes.chat_template import ChatTemplate, OutputTooLong
from torchrelay.gateway.inference.text.processes.frames import (
    CHAT_TEMPLATE,
    LENGTH_BYTES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
    Answer,
    Command,
    FileId,
    Forget,
    Load,
    Loaded,
    Prompt,
    Ready,
    Refusal,
    TextLimits,
    TokenIds,
    frame_of,
)

MAX_DETAIL_CHARS = 500
# A quarter of what the threads of workers have: the recursion of llguidance, whose depth the grammar decides, must
# overflow the stack here or nowhere.
GRAMMAR_STACK_BYTES: Final = 2 << 20


class PromptRefused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.cause)
        self.refusal = refusal


_LOADERS: dict[str, Any] = {
    TOKENIZER: partial(load_tokenizer, has_disk=False),
    TOKENIZER_CONFIG: chat_format.tokenizer_config,
    **dict.fromkeys((CHAT_TEMPLATE, TOOL_TEMPLATE), chat_format.template_file),
}


class TextService:
    """Answers commands, with the files that were loaded before."""

    def __init__(self, limits: TextLimits, grammar_error: Callable[[str], str]) -> None:
        self._limits = limits
        self._grammar_error = grammar_error
        self._loaded: dict[FileId, Any] = {}

    def forget(self, files: tuple[FileId, ...]) -> None:
        for file in files:
            del self._loaded[file]

    def load(self, file: FileId, encoded: bytes) -> Answer:
        try:
            with cpu_limit(signal.ITIMER_PROF, self._limits.load_cpu_s):
                self._loaded[file] = _LOADERS[file[0]](encoded)
        except (KeyboardInterrupt, SystemExit):
            raise
        except MemoryError:
            return Refusal("file", "out of memory")
        except BaseException as error:  # NOTE: a panic of the tokenizers library is not an Exception
            return Refusal("file", _reason(error))
        return Loaded()

    def token_ids(self, prompt: Prompt) -> Answer:
        try:
            text, syntax = (prompt.text, PLAIN) if prompt.messages is None else self._render(prompt)
            if prompt.answer_format is not None and prompt.answer_format.grammar:
                # The caller's grammar is that of the whole answer: it is reasoning only after an opening of its own.
                syntax = msgspec.structs.replace(syntax, begins_thinking=False)
            if prompt.answer_format is not None and prompt.answer_format.content:
                syntax = msgspec.structs.replace(syntax, calls_alone=True)
            token_ids, second_text = self._encode(prompt, text)
            return TokenIds(token_ids.tobytes(), syntax, self._grammar(prompt, syntax), second_text)
        except PromptRefused as error:
            return error.refusal

    def _render(self, prompt: Prompt) -> tuple[str, AnswerSyntax]:
        """The text of the prompt, and the syntax of its answer."""
        format_ = self._format(prompt)
        template = format_.tool_template or format_.template if prompt.tools else format_.template
        if template is None:
            raise PromptRefused(Refusal("no_template"))
        given = prompt.messages or ()
        if not template.takes(given, prompt.tools):
            raise PromptRefused(Refusal("no_tools"))
        syntax = merged(template.answer_syntax, format_.declared_syntax)
        if prompt.tools and syntax.calls is None:
            raise PromptRefused(Refusal("tool_calls"))
        variables = {
            **format_.special_tokens,
            **prompt.template_kwargs,
            "tools": prompt.tools or None,  # templates test for none, not for definedness
            "documents": None,
        }
        try:
            with cpu_limit(signal.ITIMER_PROF, self._limits.prompt_cpu_s):
                text = template.rendered(given, variables, prompt.max_chars, continues_last=prompt.continues_last)
                text.encode()  # fails for lone surrogates, which the library would take for a wrong type
        except OutputTooLong as error:
            raise PromptRefused(Refusal("characters", number=error.num_chars)) from error
        except UnicodeEncodeError as error:
            raise PromptRefused(Refusal("template", "its output is not valid text")) from error
        except MemoryError as error:
            raise PromptRefused(Refusal("template", "out of memory")) from error
        except RecursionError as error:
            raise PromptRefused(Refusal("template", "nested too deeply")) from error
        except Exception as error:  # a template can raise anything
            raise PromptRefused(Refusal("template", _reason(error))) from error
        if syntax.thoughts is not None:
            opening, closing = syntax.thoughts
            begun = given[-1]["content"] if prompt.continues_last else ""
            begins = text.rstrip().endswith(opening) or begun.rfind(opening) > begun.rfind(closing)
            syntax = msgspec.structs.replace(syntax, begins_thinking=begins)
        return text, syntax

    def _grammar(self, prompt: Prompt, syntax: AnswerSyntax) -> str:
        """The grammar of the answer; empty if any text will do."""
        tokenizer: Tokenizer = self._file(prompt, TOKENIZER)

        def special_id(text: str) -> int | None:
            number = tokenizer.token_to_id(text)
            added = tokenizer.get_added_tokens_decoder() if number is not None else {}
            return number if number in added and added[number].special else None

        try:
            with cpu_limit(signal.ITIMER_VIRTUAL, self._limits.prompt_cpu_s):
                source = grammar_source(prompt.answer_format or AnswerFormat(), prompt.tools, syntax, special_id)
                # What is converted from GBNF begins with options, which are the platform's to set.
                grammar = any_to_lark(source).removeprefix("%llguidance {}") if source else ""
                error = self._grammar_error(grammar) if grammar else ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # NOTE: a panic of llguidance is not an Exception
            raise PromptRefused(Refusal("format", _reason(raised))) from raised
        if error:
            is_own = prompt.answer_format is not None and prompt.answer_format.grammar
            raise PromptRefused(Refusal("format", error if is_own else schema_fault(error)))
        return grammar

    def _format(self, prompt: Prompt) -> ChatFormat:
        config: ChatFormat = self._file(prompt, TOKENIZER_CONFIG) or ChatFormat()
        template: ChatTemplate | None = self._file(prompt, CHAT_TEMPLATE)
        tool_template: ChatTemplate | None = self._file(prompt, TOOL_TEMPLATE)
        if template is None and tool_template is None:
            return config
        return replace(config, template=template or config.template, tool_template=tool_template)

    def _file(self, prompt: Prompt, name: str) -> Any:
        return next((self._loaded[file] for file in prompt.files if file[0] == name), None)

    def _encode(self, prompt: Prompt, text: str) -> tuple[array[int], int]:
        """The tokens of a text or a pair, and where those of the pair's second type begin; 0: nowhere."""
        tokenizer: Tokenizer = self._file(prompt, TOKENIZER)
        try:
            with cpu_limit(signal.ITIMER_VIRTUAL, self._limits.prompt_cpu_s):
                # A batch of one, because only batches can skip text offsets, a fifth of the work.
                given = text if prompt.second_text is None else (text, prompt.second_text)
                encoding = tokenizer.encode_batch_fast([given], add_special_tokens=prompt.adds_special_tokens)[0]
                num_left_out = 0 if prompt.second_text is not None else _num_repeated(encoding)
                ids = encoding.ids[num_left_out:]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # NOTE: a panic of the library is not an Exception
            raise PromptRefused(Refusal("tokenizer")) from error
        if len(ids) > prompt.max_tokens:
            raise PromptRefused(Refusal("tokens", number=len(ids)))
        # Some tokenizers know more tokens than the model: Gemma 3's has an image token its text models lack.
        if (highest := max(ids, default=0)) >= prompt.vocab_size:
            token = str(tokenizer.id_to_token(highest))[:MAX_DETAIL_CHARS]
            raise PromptRefused(Refusal("vocabulary", token, highest))
        is_typed = prompt.second_text is not None and 1 in encoding.type_ids
        return array("i", ids), encoding.type_ids.index(1) if is_typed else 0


def _num_repeated(encoding: Encoding) -> int:
    """The number of first tokens that the tokenizer added although the text begins with them: BOS, spelled out."""
    is_added = encoding.special_tokens_mask
    num_added = is_added.index(0) if 0 in is_added else 0
    ids = encoding.ids[: 2 * num_added]
    return num_added if ids[:num_added] == ids[num_added:] else 0


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:MAX_DETAIL_CHARS]


@contextmanager
def cpu_limit(timer: int, limit_s: float) -> Iterator[None]:
    """Has the kernel kill the process once the block has used ``limit_s`` of CPU: by SIGPROF, or SIGVTALRM for
    ITIMER_VIRTUAL.
    """
    signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)


def drop_privileges(max_memory_bytes: int) -> None:
    """Irrevocably limits memory and forbids files, sockets, processes and core dumps."""
    for kind, limit in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def set_priority(niceness: int) -> None:
    """Gives the gateway's event loop precedence, and makes this process the out-of-memory killer's first victim."""
    os.nice(niceness)
    if sys.platform == "linux":
        with suppress(OSError):  # some sandboxes forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def warm_up() -> None:
    """Triggers all lazy imports while files can be opened, including those of the error paths."""
    for source in ("{{ strftime_now('%Y') }}{{ x | tojson }}", "{{ raise_exception(1) }}", "{% for %}"):
        with suppress(Exception):
            ChatTemplate(source).render({"x": {}}, 100)
    grammar_error("start: /a/")


def in_thread(stack_bytes: int) -> Callable[[str], str]:
    """``grammar_error`` in a thread with a stack of this size, which exists from now on."""
    threads = ThreadPoolExecutor(1)
    before = threading.stack_size(stack_bytes)
    threads.submit(grammar_error, "start: /a/").result()
    threading.stack_size(before)
    return lambda grammar: threads.submit(grammar_error, grammar).result()


def serve(commands: BinaryIO, answers: socket.socket, service: TextService) -> None:
    """Answers commands until the gateway closes its end."""
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    answers.sendall(frame_of(Ready()))
    while len(length := commands.read(LENGTH_BYTES)) == LENGTH_BYTES:
        command = decoder.decode(commands.read(int.from_bytes(length, "big")))
        match command:
            case Forget(files):
                service.forget(files)
            case Load(file, num_bytes):
                answers.sendall(frame_of(service.load(file, commands.read(num_bytes))))
            case Prompt():
                answers.sendall(frame_of(service.token_ids(command)))


def main() -> None:
    limits = msgspec.json.decode(sys.argv[1], type=TextLimits)
    connection = socket.socket(fileno=0)
    commands = connection.makefile("rb")
    warm_up()
    set_priority(int(sys.argv[2]))
    check = in_thread(GRAMMAR_STACK_BYTES)
    drop_privileges(limits.max_memory_bytes)
    serve(commands, connection, TextService(limits, check))


if __name__ == "__main__":
    main()

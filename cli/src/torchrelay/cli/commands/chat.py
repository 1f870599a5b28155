"""`torchrelay chat`: chat with a model."""

from __future__ import annotations

import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Annotated, Any

import typer

from torchrelay.cli.api.access import HomeOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.api.chat_stream import Answer, ChatEvent, Message, stream_chat
from torchrelay.cli.api.client import GatewayClient, given
from torchrelay.cli.commands.model_details import ModelArgument
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.word_wrap import WordWrap

EXAMPLE = """Example:  torchrelay chat acme/glossary "What is a cold start?"

Piped:    torchrelay chat acme/glossary < question.txt"""
HELP = "/new  start over    /exit or Ctrl-D  quit    Ctrl-C  stop an answer"


def chat(
    model: ModelArgument,
    question: Annotated[str | None, typer.Argument(metavar="[QUESTION]", help="Ask once and exit.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum length of the answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0: always the most likely token.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Chat with a model; answers are streamed.

    Without a question it starts a conversation: Ctrl-C stops an answer, /exit or Ctrl-D quits. Below each answer are
    the time to first token, the rate, and the request id for `torchrelay explain`.
    """
    access = tenant_access(home, url, key, model)
    access.require_tenant("chat")
    with access.client() as client:
        conversation = Conversation(client, model, system, given(max_tokens=max_tokens, temperature=temperature))
        if question is None and not sys.stdin.isatty():
            question = _piped_question()
        if question is not None:
            if not question.strip():
                raise CliError("the question is empty", 'ask: torchrelay chat MODEL "..."')
            if not conversation.ask(question):
                raise typer.Exit(128 + signal.SIGINT)
            return
        client.call("GET", f"/v1/models/{model}")  # reports a wrong name before the first question
        converse(conversation)


def _piped_question() -> str:
    """Reads all of standard input. Raises ``CliError`` when it is empty or not UTF-8."""
    try:
        question = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise CliError("standard input is not valid UTF-8", "pipe in a text file") from error
    if not question:
        raise CliError("standard input is empty", 'ask: torchrelay chat MODEL "..."')
    return question


class Conversation:
    """The messages so far; shows answers as they arrive."""

    def __init__(self, client: GatewayClient, model: str, system: str | None, options: dict[str, Any]) -> None:
        self._client, self._model, self._options = client, model, options
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._out, self._err = console.out(), console.err()

    def restart(self) -> None:
        self._messages = list(self._opening)

    def ask(self, question: str) -> bool:
        """Streams the answer to the terminal; False when Ctrl-C stopped it. Raises ``CliError``."""
        messages = [*self._messages, {"role": "user", "content": question}]
        answer, is_complete = Answer(time.monotonic), True
        with quiet_keyboard(), closing(stream_chat(self._client, self._model, messages, self._options)) as events:
            try:
                self._show(events, answer)
            except KeyboardInterrupt:
                is_complete = False
        self._out.print()
        if answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._err.print(answer.summary() if is_complete else f"stopped · {answer.summary()}".rstrip(" ·"), style="dim")
        return is_complete

    def _show(self, events: Iterator[ChatEvent], answer: Answer) -> None:
        wrap = WordWrap(self._out.width) if sys.stdout.isatty() else None
        try:
            with self._err.status("thinking") as status:
                for event in events:
                    answer.add(event)
                    if event.text:
                        status.stop()
                        write(event.text if wrap is None else wrap.feed(console.printable(event.text)))
                    elif event.is_waiting:
                        status.update("waiting in the queue, or for the model to load", spinner_style="yellow")
        finally:
            if wrap is not None:
                write(wrap.rest())


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Keeps what is typed meanwhile from the screen; the next prompt shows it."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def write(text: str) -> None:
    """Writes to standard output at once; verbatim to a pipe, without control characters to a terminal."""
    sys.stdout.write(console.printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def converse(conversation: Conversation) -> None:
    """Reads questions until the user quits."""
    with suppress(ImportError):
        import readline  # noqa: F401 (importing it gives input() line editing)
    err = console.err()
    err.print(HELP, style="dim")
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            err.print()
            return
        except KeyboardInterrupt:
            err.print("\n(/exit or Ctrl-D to quit)", style="dim")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            conversation.restart()
        elif line.startswith("/"):
            err.print(HELP, style="dim")
        elif line:
            try:
                conversation.ask(line)
            except CliError as error:
                console.print_error(error)

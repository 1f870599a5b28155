"""`torchrelay chat`: talk to a model."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import typer

from torchrelay.cli.api.access import HomeOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.api.chat_stream import Answer, ChatEvent, Message, stream_chat
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.word_wrap import WordWrap

EXAMPLE = """Example:  torchrelay chat acme/glossary "What is a cold start?"

Piped:    torchrelay chat acme/glossary < question.txt"""
HELP = "/new  forget what was said    /exit or Ctrl-D  leave    Ctrl-C  stop an answer"


def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name: TENANT/MODEL, or MODEL of your own.")],
    question: Annotated[str | None, typer.Argument(metavar="[QUESTION]", help="Ask once and leave.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0: always the likeliest token.")] = None,
    system: Annotated[str | None, typer.Option(help="System message, said before everything else.")] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Talk to a model; answers come as they are made.

    Without a question it is a conversation: Ctrl-C stops an answer, /exit or Ctrl-D leaves. After each answer it
    shows the time to the first token, the rate, and the request id that `torchrelay explain` takes.
    """
    access = tenant_access(home, url, key)
    access.require_tenant("chat")
    options = {"max_tokens": max_tokens, "temperature": temperature}
    with access.client() as client:
        talk = Conversation(client, model, system, {name: one for name, one in options.items() if one is not None})
        if question is None and not sys.stdin.isatty():
            question = _piped_question()
        if question is not None:
            if not talk.ask(question):
                raise typer.Exit(128 + signal.SIGINT)
            return
        client.call("GET", f"/v1/models/{model}")  # a wrong name is told before the first question
        converse(talk)


def _piped_question() -> str:
    """All of standard input. Raises ``Problem`` when that is empty, or no text."""
    try:
        question = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise CliError("standard input is no UTF-8 text", "pipe a text file into it") from error
    if not question:
        raise CliError("there is no question on standard input", 'ask: torchrelay chat MODEL "..."')
    return question


class Conversation:
    """The messages so far, and how answers are shown."""

    def __init__(self, client: GatewayClient, model: str, system: str | None, options: dict[str, Any]) -> None:
        self._client, self._model, self._options = client, model, options
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._out, self._err = console.out(), console.err()

    def restart(self) -> None:
        self._messages = list(self._opening)

    def ask(self, question: str) -> bool:
        """Streams the answer to the terminal; False when Ctrl-C stopped it. Raises ``Problem``."""
        asked = [*self._messages, {"role": "user", "content": question}]
        answer, is_whole = Answer(time.monotonic), True
        with closing(stream_chat(self._client, self._model, asked, self._options)) as events:
            try:
                self._show(events, answer)
            except KeyboardInterrupt:
                is_whole = False
        self._out.print()
        if answer.text:
            self._messages = [*asked, {"role": "assistant", "content": answer.text}]
        self._err.print(answer.summary() if is_whole else f"stopped · {answer.summary()}".rstrip(" ·"), style="dim")
        return is_whole

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
                        status.update("waiting for a place, or for the model to wake", spinner_style="yellow")
        finally:
            if wrap is not None:
                write(wrap.rest())


def write(text: str) -> None:
    """To standard output at once: as it is into a pipe, without control characters onto a terminal."""
    sys.stdout.write(console.printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def converse(talk: Conversation) -> None:
    """Reads questions until the person leaves."""
    _line_editing()
    shown = console.err()
    shown.print(HELP, style="dim")
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            shown.print()
            return
        except KeyboardInterrupt:
            shown.print("\n(/exit or Ctrl-D leaves)", style="dim")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            talk.restart()
        elif line.startswith("/"):
            shown.print(HELP, style="dim")
        elif line:
            try:
                talk.ask(line)
            except CliError as problem:
                console.print_error(problem)


def _line_editing() -> None:
    try:
        import readline  # noqa: F401 (imported for what it does to input())
    except ImportError:
        return

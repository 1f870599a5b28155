"""A tenant that has nothing to do with an attack: its chats, from a process that shares nothing with the attacker's.

    python -m tests.hostile.neighbour PORT KEY MODEL PAUSE_S

Each line of stdin asks for a round: at least so many chats, one after the other with a pause between, each over a new
connection, until the next line of stdin ends it. Then a line of stdout is a JSON list of the seconds of each. A chat
that fails, takes longer than ``HANG_S``, or is answered differently from the first chat ends the process. After a 503
it is asked again, twice, as the official clients do; the seconds count from the first try.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import IO

HANG_S = 20.0  # a hundred times what a chat takes beside other work; an attacker must not stop it for so long


class Neighbour:
    """The process, seen from the test: rounds of chats."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        self._commands: IO[str] = process.stdin
        self._rounds: IO[str] = process.stdout

    def begin(self, at_least: int = 1) -> None:
        print(at_least, file=self._commands, flush=True)

    def end(self) -> list[float]:
        """The seconds of the round's chats. Raises ``AssertionError`` if one failed."""
        print(file=self._commands, flush=True)
        line = self._rounds.readline()
        assert line, "a chat of the neighbour failed; its traceback is on stderr"
        chats_s: list[float] = json.loads(line)
        return chats_s

    def chats_s(self, count: int) -> list[float]:
        """A round of so many chats."""
        self.begin(count)
        return self.end()


@contextmanager
def neighbour_process(port: int, key: str, model: str, pause_s: float) -> Iterator[Neighbour]:
    command = [sys.executable, "-m", "tests.hostile.neighbour", str(port), key, model, str(pause_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Neighbour(process)


def ask(port: int, key: str, model: str) -> str:
    """The answer to its one question."""
    question = {"role": "user", "content": "What is a relay?"}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 12, "temperature": 0})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    status, text = 503, ""
    for pause_s in (0.0, 0.5, 1.0):
        if status == 503:
            time.sleep(pause_s)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
            with closing(connection):
                connection.request("POST", "/v1/chat/completions", body, headers)
                reply = connection.getresponse()
                status, text = reply.status, reply.read().decode()
    assert status == 200, f"{status}: {text}"
    answer: str = json.loads(text)["choices"][0]["message"]["content"]
    return answer


def main(port: int, key: str, model: str, pause_s: float) -> None:
    expected = ask(port, key, model)
    with open(0, "rb", buffering=0) as commands:  # what a buffer holds, select does not see
        while at_least := commands.readline():
            chats_s: list[float] = []
            while len(chats_s) < int(at_least) or not select.select([commands], [], [], pause_s)[0]:
                begin = time.monotonic()
                answer = ask(port, key, model)
                chats_s.append(time.monotonic() - begin)
                assert answer == expected, f"{answer!r} is not {expected!r}"
            commands.readline()
            print(json.dumps(chats_s), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))

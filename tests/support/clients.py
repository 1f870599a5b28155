"""Clients that call without a pause while something is replaced beneath them: no call may fail, no answer be wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.support.completions import stream
from tests.support.platform import Platform

NUM_TOKENS = 64  # of each answer
TIMEOUT_S = 90.0


@dataclass(slots=True)
class Outcomes:
    """Answers of all clients. ``max_gap_s``: the longest time without a token within an answer."""

    num_answers: int = 0
    num_received: int = 0
    num_wrong: int = 0
    num_passed_by: int = 0  # refused connections, after which the other gateway was asked
    max_gap_s: float = 0.0
    errors: list[str] = field(default_factory=list)


class Clients:
    """Threads that stream answers until they are stopped; each asks the gateways in turn, and compares its answers."""

    def __init__(self, gateways: list[Platform], key: str, model: str, number: int) -> None:
        self._gateways, self._key, self._model = gateways, key, model
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._prompts = [list(range(20 + i, 52 + i)) for i in range(number)]
        self._used = dict.fromkeys(range(number), key)  # the key of each client's present request
        self._num_answers = [0] * number
        self.outcomes = Outcomes()
        self.expected = [self._answer(gateways[0], prompt, key)[0] for prompt in self._prompts]

    def change_key(self, key: str) -> None:
        """The next request of each client has this key."""
        with self._lock:
            self._key = key

    def uses(self, key: str) -> bool:
        """Whether a request with the key may be in progress."""
        with self._lock:
            return key in self._used.values()

    def num_answers(self) -> list[int]:
        """The number of answers of each client."""
        with self._lock:
            return [*self._num_answers]

    def _answer(self, gateway: Platform, prompt: list[int], key: str) -> tuple[list[int], float]:
        """Token ids, and the longest gap."""
        tokens: list[int] = []
        gap_s, last_s = 0.0, 0.0
        options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout_s": TIMEOUT_S}
        for state in stream(gateway, key, self._model, prompt, **options):
            assert state.error is None, state.error
            if len(state.token_ids) > len(tokens):
                now_s = time.monotonic()
                gap_s, last_s = max(gap_s, now_s - last_s) if tokens else 0.0, now_s
                tokens = [*state.token_ids]
        assert state.done, "the stream ended early"
        return tokens, gap_s

    def _ask(self, number: int, turn: int) -> None:
        with self._lock:
            key = self._used[number] = self._key
        for gateway in (self._gateways[turn % 2], self._gateways[1 - turn % 2]) * 2:
            try:
                tokens, gap_s = self._answer(gateway, self._prompts[number], key)
            except httpx.ConnectError:
                with self._lock:
                    self.outcomes.num_passed_by += 1
                continue
            except (httpx.TransportError, AssertionError) as error:
                with self._lock:
                    self.outcomes.errors.append(repr(error)[:300])
                return
            with self._lock:
                self.outcomes.num_answers += 1
                self._num_answers[number] += 1
                self.outcomes.num_received += len(tokens)
                self.outcomes.num_wrong += tokens != self.expected[number]
                self.outcomes.max_gap_s = max(self.outcomes.max_gap_s, gap_s)
            return
        with self._lock:
            self.outcomes.errors.append("no gateway accepted the connection")

    def _run(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            self._ask(number, turn)
            turn += 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(self._prompts))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

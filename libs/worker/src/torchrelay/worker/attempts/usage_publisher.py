"""Usage registers on JetStream: how far each choice got, in case its gateway dies before it settles the request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client

from torchrelay.common.cancellation import raise_if_cancelled
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.worker.attempts.attempt import Attempt

log = get_logger(__name__)
PUBLISH_INTERVAL_S = 1.0
MAX_UNSENT_REGISTERS = 1 << 16  # while NATS is away; the oldest are dropped first


@dataclass(slots=True)
class _OpenRegister:
    register: pb.UsageRegister
    published: tuple[int, int] = (0, 0)  # prompt tokens and output position

    @property
    def position(self) -> tuple[int, int]:
        return self.register.num_prompt_tokens, self.register.output_position


class UsagePublisher:
    """Publishes the register of every choice at its first token, every second, and at its end. While a long prompt is
    computed, its first open choice has the request's register."""

    # Registers merge by maximum, so a lost or repeated one makes a bill late, never wrong. Publishing therefore never
    # delays a token and waits for no acknowledgement.

    def __init__(self, client: Client, subjects: Subjects) -> None:
        self.client, self._subjects = client, subjects
        self._entries: dict[tuple[str, int], _OpenRegister] = {}
        self._urgent: deque[pb.UsageRegister] = deque(maxlen=MAX_UNSENT_REGISTERS)
        self._wake = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Choices whose register may still rise."""
        return len(self._entries)

    def advance(self, attempt: Attempt, output: pb.ChoiceOutput) -> None:
        """Advances a choice's register by what was put into its gateway's outbox."""
        key = (output.key.request_id, output.choice)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _OpenRegister(
                pb.UsageRegister(
                    request_id=output.key.request_id,
                    choice=output.choice,
                    gateway_id=attempt.outbox.gateway_id,
                )
            )
        register = entry.register
        is_first_token = bool(output.token_ids) and not register.output_position
        num_prompt = attempt.start.num_prompt_tokens if output.token_ids else output.num_prompt_tokens
        register.attempt = output.key.attempt
        register.num_prompt_tokens = max(register.num_prompt_tokens, num_prompt)
        register.num_cached_prompt_tokens = max(register.num_cached_prompt_tokens, output.num_cached_prompt_tokens)
        if output.token_ids:
            register.output_position = max(register.output_position, output.first_position + len(output.token_ids))
        register.cause = output.finish_reason
        if output.finish_reason:
            del self._entries[key]
        if is_first_token or output.finish_reason:
            entry.published = entry.position
            self._urgent.append(pb.UsageRegister.FromString(register.SerializeToString()))
            self._wake.set()

    def forget(self, attempt: Attempt, cause: pb.FinishReason.ValueType) -> None:
        """The attempt ended without a last token: publishes the registers of its open choices."""
        for choice in attempt.open_choices:
            if entry := self._entries.pop((attempt.start.key.request_id, choice), None):
                entry.register.cause = cause
                self._urgent.append(entry.register)
                self._wake.set()

    def hand_off(self, attempt: Attempt) -> None:
        """Another worker continues the open choices and publishes from here on."""
        for choice in attempt.open_choices:
            self._entries.pop((attempt.start.key.request_id, choice), None)

    async def run(self) -> None:
        """Publishes until cancelled."""
        due_s = time.monotonic() + PUBLISH_INTERVAL_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            if time.monotonic() >= due_s:  # however often urgent registers woke it
                self._gather_advanced()
                due_s = time.monotonic() + PUBLISH_INTERVAL_S
            await self.flush()
            raise_if_cancelled()

    def _gather_advanced(self) -> None:
        for entry in self._entries.values():
            if entry.position != entry.published:
                entry.published = entry.position
                self._urgent.append(entry.register)

    async def flush(self) -> None:
        """Publishes what is due; what fails is kept for the next flush."""
        try:
            while self._urgent:
                register = self._urgent.popleft()
                try:
                    await self.client.publish(self._subjects.usage(register.gateway_id), register.SerializeToString())
                except BaseException:  # cancellation too: publishing twice is harmless, losing it is not
                    self._urgent.appendleft(register)
                    raise
        except (nats.errors.Error, OSError) as error:
            log.warning("usage_not_published", error=str(error), num_registers=len(self._urgent))

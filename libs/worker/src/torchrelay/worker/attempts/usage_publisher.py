"""Usage registers on JetStream: the progress of each choice, in case its gateway dies before it settles the request."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import nats.errors
from nats.aio.client import Client
from nats.js.api import PubAck

from torchrelay.common.cancellation import cancellable, raise_if_cancelled
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.worker.attempts.attempt import Attempt

log = get_logger(__name__)
PUBLISH_INTERVAL_S = 1.0
ACK_LIMIT_S = 2.0
BATCH_REGISTERS = 256
MAX_UNSENT_REGISTERS = 1 << 16  # while NATS is away or its disk is full; the oldest beyond this are dropped


@dataclass(slots=True)
class _OpenRegister:
    register: pb.UsageRegister
    published: tuple[int, int] = (0, 0)  # prompt tokens and output position

    @property
    def position(self) -> tuple[int, int]:
        return self.register.num_prompt_tokens, self.register.output_position


class UsagePublisher:
    """Publishes the register of every choice at its first token, every second, and at its end.

    While a long prompt is computed, its first open choice has the request's register. Registers merge by maximum: one
    register per choice is kept until the stream has accepted it, and publishing it twice is harmless. Publishing never
    delays a token.
    """

    def __init__(
        self,
        client: Client,
        subjects: Subjects,
        interval_s: float = PUBLISH_INTERVAL_S,
        ack_limit_s: float = ACK_LIMIT_S,
        max_unsent: int = MAX_UNSENT_REGISTERS,
    ) -> None:
        self.client, self._jetstream, self._subjects = client, client.jetstream(), subjects
        self._interval_s, self._ack_limit_s, self._max_unsent = interval_s, ack_limit_s, max_unsent
        self._entries: dict[tuple[str, int], _OpenRegister] = {}
        self._unsent: dict[tuple[str, int], pb.UsageRegister] = {}  # by request and choice
        self._is_refused = False
        self._wake = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Choices whose register may still rise."""
        return len(self._entries)

    @property
    def num_unsent(self) -> int:
        """Registers that the stream has not accepted."""
        return len(self._unsent)

    def advance(self, attempt: Attempt, output: pb.ChoiceOutput) -> None:
        """Advances a choice's register by an output that was put into its gateway's outbox."""
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
            self._put(entry)
            self._wake.set()

    def forget(self, attempt: Attempt, cause: pb.FinishReason.ValueType) -> None:
        """Publishes the registers of the open choices of an attempt that ended without a last token."""
        for choice in attempt.open_choices:
            if entry := self._entries.pop((attempt.start.key.request_id, choice), None):
                entry.register.cause = cause
                self._put(entry)
                self._wake.set()

    def hand_off(self, attempt: Attempt) -> None:
        """Stops publishing the open choices of an attempt, which another worker continues and publishes."""
        for choice in attempt.open_choices:
            self._entries.pop((attempt.start.key.request_id, choice), None)

    async def run(self) -> None:
        """Publishes until cancelled."""
        due_s = time.monotonic() + self._interval_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            if time.monotonic() >= due_s:  # even if urgent registers wake it often
                self._gather_advanced()
                due_s = time.monotonic() + self._interval_s
            is_accepted = await self.flush()
            raise_if_cancelled()
            if not is_accepted:  # do not retry for every token
                await asyncio.sleep(due_s - time.monotonic())

    def _gather_advanced(self) -> None:
        for entry in self._entries.values():
            if entry.position != entry.published:
                self._put(entry)

    def _put(self, entry: _OpenRegister) -> None:
        entry.published = entry.position
        key = (entry.register.request_id, entry.register.choice)
        self._unsent[key] = _merged(self._unsent.get(key), entry.register)
        if len(self._unsent) > self._max_unsent:
            del self._unsent[next(iter(self._unsent))]

    async def flush(self) -> bool:
        """Publishes all unsent registers.

        Returns False, and keeps the rest, if the stream does not accept all of them.
        """
        fault = ""
        while not fault and (batch := list(islice(self._unsent.items(), BATCH_REGISTERS))):
            fault = "NATS does not answer"
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self._ack_limit_s):
                    fault = await cancellable(self._publish(batch))
        if bool(fault) != self._is_refused:
            self._is_refused = bool(fault)
            log.warning(
                "usage_not_published" if fault else "usage_published", error=fault, num_registers=self.num_unsent
            )
        return not fault

    async def _publish(self, batch: list[tuple[tuple[str, int], pb.UsageRegister]]) -> str:
        """Publishes a batch; returns the reason why not all registers were accepted, or an empty string."""
        if not self.client.is_connected:
            return "NATS is away"
        acks: list[asyncio.Future[PubAck]] = []
        try:
            for _, register in batch:
                subject = self._subjects.usage(register.gateway_id)
                acks.append(await self._jetstream.publish_async(subject, register.SerializeToString()))
            await asyncio.wait(acks, timeout=self._ack_limit_s)
        except (nats.errors.Error, OSError) as error:
            return str(error) or repr(error)
        finally:
            # All outstanding acks, also of a publication that raised: each holds one of the client's permits.
            for ack in tuple(self._jetstream._publish_async_futures.values()):
                ack.cancel()
        fault = ""
        for (key, sent), ack in zip(batch, acks, strict=True):
            if ack.cancelled() or ack.exception() is not None:
                fault = "NATS does not answer" if ack.cancelled() else str(ack.exception()) or repr(ack.exception())
                self._unsent[key] = self._unsent.pop(key, sent)  # last in the next batch
            elif self._unsent.get(key) == sent:
                del self._unsent[key]
        return fault


def _merged(unsent: pb.UsageRegister | None, newer: pb.UsageRegister) -> pb.UsageRegister:
    """Merges registers of a choice like the gateway, also of two attempts; other fields are the newer register's."""
    merged = pb.UsageRegister()
    merged.CopyFrom(newer)
    if unsent is not None:
        merged.num_prompt_tokens = max(unsent.num_prompt_tokens, newer.num_prompt_tokens)
        merged.num_cached_prompt_tokens = max(unsent.num_cached_prompt_tokens, newer.num_cached_prompt_tokens)
        merged.output_position = max(unsent.output_position, newer.output_position)
    return merged

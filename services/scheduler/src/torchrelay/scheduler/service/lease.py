"""The lease by which one of several schedulers is active: a message that its holder renews in a stream of NATS.

The stream keeps a single message, and drops it after the lease's time, so no clocks are compared. Each write names the
sequence number that it replaces, so of two contenders one succeeds. The lease decides who acts, not who may: commands
of an earlier holder, which was paused, are refused by epoch. A holder that cannot reach NATS therefore goes on, and
ends once it learns that another scheduler has the lease. After a fault of NATS contenders let it renew first.

NOTE: In a cluster, contenders that replace a message at the same moment may all be told that they have, since the
leader of the stream compares sequence numbers before the servers agree. Only the last of them can renew its message.
"""

from __future__ import annotations

import asyncio

import nats
from nats.aio.client import Client
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

from torchrelay.common.cancellation import raise_if_cancelled
from torchrelay.common.errors import Conflict
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)

_FREE = b""
_NO_MESSAGE = 0  # the sequence number that a write replaces where the stream has none
_LOOK_EVERY_S = 0.2
_TIMEOUT_S = 1.0
_WRONG_LAST_SEQUENCE, _NO_SUCH_MESSAGE, _STREAM_EXISTS = 10071, 10037, 10058  # error codes of JetStream's API
_FAULTS = (nats.errors.Error, OSError)  # those of JetStream included


class Lease:
    """The lease, for one contender. ``holder``: its address and host; ``lease_s``: how long it lasts unrenewed."""

    def __init__(self, client: Client, subjects: Subjects, holder: str, lease_s: float, num_replicas: int = 1) -> None:
        self._js = client.jetstream(timeout=_TIMEOUT_S)
        self._subjects, self._holder = subjects, holder.encode()
        self._lease_s, self._num_replicas = lease_s, num_replicas
        self._sequence = _NO_MESSAGE  # of the own message, while it holds the lease

    async def acquire(self) -> None:
        """Waits until this contender holds the lease, as the successor of a holder with the same name at once."""
        is_after_fault = not await self._ensure_stream()
        while True:
            raise_if_cancelled()
            pause_s = _LOOK_EVERY_S
            try:
                replaced = await self._replaceable()
                if is_after_fault:  # the holder, if it lives, renews the lease meanwhile
                    pause_s = _TIMEOUT_S + self._lease_s / 2
                elif replaced is not None and await self._write(self._holder, replaced):
                    if replaced == _NO_MESSAGE:
                        return
                    await asyncio.sleep(_LOOK_EVERY_S)
                    if await self._write(self._holder, self._sequence):  # it was the last of those at that moment
                        return
                is_after_fault = False
            except _FAULTS as error:
                if not is_after_fault:
                    log.warning("lease_unknown", error=repr(error)[:200])
                is_after_fault = True
                await self._ensure_stream()
            await asyncio.sleep(pause_s)

    async def keep(self) -> None:
        """Renews the lease until cancelled. Raises ``Conflict`` once another scheduler has it."""
        while True:
            raise_if_cancelled()
            await asyncio.sleep(self._lease_s / 4)
            try:
                if await self._write(self._holder, self._sequence):
                    continue
                replaced = await self._replaceable()
                if replaced is not None and await self._write(self._holder, replaced):
                    continue
            except nats.js.errors.NoStreamResponseError:  # NATS was started again, and keeps the lease in memory
                await self._ensure_stream()
                continue
            except _FAULTS as error:
                log.warning("lease_not_renewed", error=repr(error)[:200])
                continue
            raise Conflict("another scheduler has the lease: this one was paused, or cut off from NATS")

    async def release(self) -> None:
        """Frees the lease for the next contender, if NATS answers."""
        try:
            await self._write(_FREE, self._sequence)
        except _FAULTS as error:
            log.warning("lease_not_released", error=repr(error)[:200])

    async def _replaceable(self) -> int | None:
        """The sequence number of the message that this contender may replace; None: another has the lease.

        Raises nats-py's errors.
        """
        try:
            message = await self._js.get_last_msg(self._subjects.lease_stream, self._subjects.lease)
        except nats.js.errors.NotFoundError as error:
            if error.err_code != _NO_SUCH_MESSAGE:
                raise
            return _NO_MESSAGE
        if message.data not in (_FREE, self._holder, None):
            return None
        return message.seq or _NO_MESSAGE

    async def _write(self, content: bytes, replaced: int) -> bool:
        """Replaces the message with this sequence number. False: it is not the last message any more."""
        expected = {"Nats-Expected-Last-Subject-Sequence": str(replaced)}
        try:
            stored = await self._js.publish(
                self._subjects.lease, content, stream=self._subjects.lease_stream, headers=expected
            )
        except nats.js.errors.APIError as error:
            if error.err_code != _WRONG_LAST_SEQUENCE:
                raise
            return False
        self._sequence = stored.seq
        return True

    async def _ensure_stream(self) -> bool:
        """Creates the stream, or gives it this contender's lease time and replicas; returns whether it has them."""
        config = StreamConfig(
            name=self._subjects.lease_stream,
            subjects=[self._subjects.lease],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.MEMORY,
            max_age=self._lease_s,
            duplicate_window=self._lease_s,
            max_msgs_per_subject=1,
            num_replicas=self._num_replicas,
        )
        try:
            try:
                await self._js.add_stream(config)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != _STREAM_EXISTS:
                    raise
                await self._js.update_stream(config)  # it exists with another configuration
        except _FAULTS as error:
            log.warning("lease_stream_not_ensured", error=repr(error)[:200])
            return False
        return True

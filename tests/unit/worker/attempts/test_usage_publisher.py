"""Usage registers reach JetStream at the first token, every second and at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig

from tests.support.silent_proxy import SilentProxy
from tests.support.stalled_broker import assert_it_ends, stalled_client
from tests.support.wait import HANG_S, eventually
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.core import Finish, NewToken, PromptProgress
from torchrelay.worker.attempts.attempt import Attempt
from torchrelay.worker.attempts.outbox import Outbox
from torchrelay.worker.attempts.usage_publisher import UsagePublisher


def attempt() -> Attempt:
    start = pb.AttemptStart(
        key=types_pb2.AttemptKey(request_id="req-7", attempt=1),
        num_prompt_tokens=12,
        choices=[pb.ChoiceStart(choice=0)],
    )
    return Attempt(start, Outbox("gw-1"), {})


def advance(
    publisher: UsagePublisher, attempt: Attempt, position: int, finish: Finish | None = None, num_cached: int = 0
) -> None:
    """Advances the register of choice 0 by the token at an output position."""
    token = NewToken(attempt.group_id, 0, position, 5, finish, num_cached)
    publisher.advance(attempt, attempt.output(token, finish))


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    client = await connect(nats_url, "test")
    yield client
    await client.close()


@pytest.fixture
async def subjects(client: Client) -> Subjects:
    """The subjects of a deployment, whose streams exist."""
    subjects = Subjects(new_id("usage"))
    await ensure_streams(client.jetstream(), subjects)
    return subjects


@asynccontextmanager
async def running(publisher: UsagePublisher) -> AsyncIterator[None]:
    task = asyncio.ensure_future(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_registers_are_published_at_first_token_interval_and_end(client: Client, subjects: Subjects) -> None:
    publisher = UsagePublisher(client, subjects, 0.1)
    subscription = await client.jetstream().subscribe(subjects.usage("gw-1"))

    async def received() -> pb.UsageRegister:
        message = await subscription.next_msg(timeout=HANG_S)
        return pb.UsageRegister.FromString(message.data)

    async with running(publisher):
        open_attempt = attempt()
        advance(publisher, open_attempt, 0)
        first = await received()
        advance(publisher, open_attempt, 1)
        advance(publisher, open_attempt, 2)
        middle = await received()
        advance(publisher, open_attempt, 3, Finish.LENGTH)
        last = await received()
        assert [first.output_position, middle.output_position, last.output_position] == [1, 3, 4]
    assert (first.num_prompt_tokens, first.gateway_id, first.attempt) == (12, "gw-1", 1)
    assert last.cause == pb.FINISH_REASON_LENGTH


async def test_prompt_in_prefill_has_register(client: Client, subjects: Subjects) -> None:
    publisher = UsagePublisher(client, subjects, 0.1)
    subscription = await client.jetstream().subscribe(subjects.usage("gw-1"))

    async def received() -> tuple[int, int, int]:
        register = pb.UsageRegister.FromString((await subscription.next_msg(timeout=HANG_S)).data)
        return register.num_prompt_tokens, register.num_cached_prompt_tokens, register.output_position

    async with running(publisher):
        open_attempt = attempt()
        for computed in (4, 8, 6):
            publisher.advance(open_attempt, open_attempt.prompt_output(PromptProgress("req-7/1", computed, 2)))
        assert await received() == (8, 2, 0)  # once, at the interval
        advance(publisher, open_attempt, 0, num_cached=2)
        assert await received() == (12, 2, 1)  # the first token is published at once
        left = attempt()
        left.start.key.request_id = "req-8"
        publisher.advance(left, left.prompt_output(PromptProgress("req-8/1", 5, 0)))
        publisher.forget(left, pb.FINISH_REASON_CANCELLED)
        assert await received() == (5, 0, 0)


async def test_dropped_attempt_publishes_its_register(client: Client, subjects: Subjects) -> None:
    publisher = UsagePublisher(client, subjects)
    open_attempt = attempt()
    advance(publisher, open_attempt, 0)
    assert await publisher.flush()
    advance(publisher, open_attempt, 1)
    publisher.forget(open_attempt, pb.FINISH_REASON_CANCELLED)
    await publisher.flush()
    await client.flush()
    registers = await registers_of(client, subjects, 2)
    assert [register.output_position for register in registers] == [1, 2]
    assert registers[-1].cause == pb.FINISH_REASON_CANCELLED


async def test_busy_publisher_keeps_its_interval(client: Client, subjects: Subjects) -> None:
    """Finished choices wake the publisher all the time, which must not delay the periodic registers."""
    publisher = UsagePublisher(client, subjects, 0.2)
    subscription = await client.jetstream().subscribe(subjects.usage("gw-1"))
    open_attempt = attempt()

    async def keep_busy() -> None:
        for position in count():
            advance(publisher, open_attempt, position)
            key = types_pb2.AttemptKey(request_id=f"other-{position}", attempt=1)
            other = Attempt(pb.AttemptStart(key=key, choices=[pb.ChoiceStart(choice=0)]), Outbox("gw-2"), {})
            advance(publisher, other, 0, Finish.STOP)
            await asyncio.sleep(0.01)

    async with running(publisher):
        busy = asyncio.ensure_future(keep_busy())
        messages = [await subscription.next_msg(timeout=HANG_S) for _ in range(2)]
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    first, second = (pb.UsageRegister.FromString(message.data).output_position for message in messages)
    assert first == 1 and second > 1
    assert publisher.num_open == 1  # the registers of the others are closed
    publisher.hand_off(open_attempt)
    assert publisher.num_open == 0


async def test_cancel_swallowed_by_client_ends_publishing() -> None:
    async with stalled_client() as client:
        publisher = UsagePublisher(client, Subjects("usage-stalled"))
        open_attempt = attempt()
        advance(publisher, open_attempt, 0)
        await assert_it_ends(publisher.run(), client)


async def registers_of(client: Client, subjects: Subjects, number: int) -> list[pb.UsageRegister]:
    subscription = await client.jetstream().pull_subscribe(subjects.usage("gw-1"), "reader")
    return [pb.UsageRegister.FromString(m.data) for m in await subscription.fetch(number, timeout=HANG_S)]


async def test_unpublished_register_is_published_later(nats_url: str, client: Client, subjects: Subjects) -> None:
    async with SilentProxy(nats_url).serving() as proxy:
        publisher = UsagePublisher(await connect(proxy.url, "away"), subjects, ack_limit_s=0.2)
        open_attempt = attempt()
        proxy.fall_silent()
        advance(publisher, open_attempt, 0)
        assert not await publisher.flush()
        assert publisher.num_unsent == 1
        proxy.speak()
        async with asyncio.timeout(HANG_S):
            while not await publisher.flush():
                pass
    assert (await registers_of(client, subjects, 1))[0].output_position == 1
    assert publisher.num_unsent == 0


async def test_refused_registers_are_published_once_accepted(client: Client) -> None:
    """NATS refuses registers while its disk is full; here the stream's message limit is too small for a register."""
    subjects = Subjects(new_id("usage"))
    stream = StreamConfig(name=subjects.usage_stream, subjects=[subjects.usage("*")], max_msg_size=1)
    await client.jetstream().add_stream(stream)
    publisher = UsagePublisher(client, subjects, interval_s=0.1, ack_limit_s=0.5)
    ended, open_attempt = attempt(), attempt()
    ended.start.key.request_id = "req-8"
    advance(publisher, ended, 0, Finish.LENGTH)
    async with running(publisher):
        for position in range(3):
            advance(publisher, open_attempt, position)
            assert not await publisher.flush()
        assert publisher.num_unsent == 2  # the newest of each choice
        await client.jetstream().update_stream(stream.evolve(max_msg_size=-1))
        await eventually(lambda: not publisher.num_unsent, "publication of all registers")
    registers = {register.request_id: register for register in await registers_of(client, subjects, 2)}
    assert {key: register.output_position for key, register in registers.items()} == {"req-7": 3, "req-8": 1}
    assert registers["req-8"].cause == pb.FINISH_REASON_LENGTH


async def test_later_attempt_keeps_usage_of_earlier_attempt(client: Client, subjects: Subjects) -> None:
    publisher = UsagePublisher(client, subjects)
    first, second = attempt(), attempt()
    for position in range(5):
        finish = Finish.LENGTH if position == 4 else None
        advance(publisher, first, position, finish, num_cached=3)
    second.start.key.attempt = 2
    publisher.advance(second, second.prompt_output(PromptProgress("req-7/2", 1, 0)))
    publisher.forget(second, pb.FINISH_REASON_CANCELLED)
    assert await publisher.flush()
    (register,) = await registers_of(client, subjects, 1)
    used = (register.num_prompt_tokens, register.num_cached_prompt_tokens, register.output_position)
    assert (used, register.attempt) == ((12, 3, 5), 2)


async def test_failed_publication_releases_its_permit(
    client: Client, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = UsagePublisher(client, subjects)
    open_attempt, num_tries = attempt(), 0

    async def fail(*_: object, **__: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise OSError  # without a message

    with monkeypatch.context() as patched:
        patched.setattr(client, "publish", fail)
        advance(publisher, open_attempt, 0)
        assert not await publisher.flush()
    assert (num_tries, publisher._jetstream.publish_async_pending(), publisher.num_unsent) == (1, 0, 1)
    assert await publisher.flush()
    assert (await registers_of(client, subjects, 1))[0].output_position == 1


async def test_unaccepted_registers_are_bounded(client: Client) -> None:
    publisher = UsagePublisher(client, Subjects(new_id("usage")), ack_limit_s=0.2, max_unsent=10)
    for number in range(30):
        ended = attempt()
        ended.start.key.request_id = f"req-{number}"
        advance(publisher, ended, 0, Finish.STOP)
    assert not await publisher.flush()
    assert publisher.num_unsent == 10

"""Usage registers reach JetStream at the first token, every second and at the end."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig

from tests.support.silent_proxy import SilentProxy
from tests.support.stalled_broker import assert_it_ends, stalled_client
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.core import Finish, NewToken, PromptProgress
from torchrelay.worker.attempts import usage_publisher
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


async def test_registers_are_published_first_periodically_and_last(nats_url: str) -> None:
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-test")
    await ensure_streams(client.jetstream(), subjects)
    publisher = UsagePublisher(client, subjects)
    running = asyncio.ensure_future(publisher.run())
    subscription = await client.jetstream().subscribe(subjects.usage("gw-1"))

    async def received() -> pb.UsageRegister:
        message = await subscription.next_msg(timeout=5)
        return pb.UsageRegister.FromString(message.data)

    try:
        one = attempt()
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 0, 5), None))
        first = await received()
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 1, 5), None))
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 2, 5), None))
        middle = await received()
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 3, 5, Finish.LENGTH), Finish.LENGTH))
        last = await received()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
    assert [first.output_position, middle.output_position, last.output_position] == [1, 3, 4]
    assert (first.num_prompt_tokens, first.gateway_id, first.attempt) == (12, "gw-1", 1)
    assert last.cause == pb.FINISH_REASON_LENGTH


async def test_a_prompt_that_is_being_computed_has_a_register(nats_url: str) -> None:
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-prompt")
    await ensure_streams(client.jetstream(), subjects)
    publisher = UsagePublisher(client, subjects)
    running = asyncio.ensure_future(publisher.run())
    subscription = await client.jetstream().subscribe(subjects.usage("gw-1"))

    async def received() -> tuple[int, int, int]:
        register = pb.UsageRegister.FromString((await subscription.next_msg(timeout=5)).data)
        return register.num_prompt_tokens, register.num_cached_prompt_tokens, register.output_position

    try:
        one = attempt()
        for computed in (4, 8, 6):
            publisher.advance(one, one.prompt_output(PromptProgress("req-7/1", computed, 2)))
        assert await received() == (8, 2, 0)  # within a second, once
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 0, 5, num_cached=2), None))
        assert await received() == (12, 2, 1)  # the first token is told at once
        left = attempt()
        left.start.key.request_id = "req-8"
        publisher.advance(left, left.prompt_output(PromptProgress("req-8/1", 5, 0)))
        publisher.forget(left, pb.FINISH_REASON_CANCELLED)
        assert await received() == (5, 0, 0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def test_a_dropped_attempt_publishes_where_it_stands(nats_url: str) -> None:
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-drop")
    await ensure_streams(client.jetstream(), subjects)
    publisher = UsagePublisher(client, subjects)
    one = attempt()
    publisher.advance(one, one.output(NewToken("req-7/1", 0, 0, 5), None))
    assert await publisher.flush()
    publisher.advance(one, one.output(NewToken("req-7/1", 0, 1, 5), None))
    publisher.forget(one, pb.FINISH_REASON_CANCELLED)
    await publisher.flush()
    await client.flush()
    subscription = await client.jetstream().pull_subscribe(subjects.usage("gw-1"), "reader")
    registers = [pb.UsageRegister.FromString(m.data) for m in await subscription.fetch(2, timeout=5)]
    await client.close()
    assert [register.output_position for register in registers] == [1, 2]
    assert registers[-1].cause == pb.FINISH_REASON_CANCELLED


async def test_a_busy_worker_still_publishes_the_long_ones_every_second(nats_url: str) -> None:
    """What others finish wakes the publisher all the time; that must not put the periodic registers off."""
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-busy")
    await ensure_streams(client.jetstream(), subjects)
    publisher = UsagePublisher(client, subjects)
    running = asyncio.ensure_future(publisher.run())
    one = attempt()
    for position in range(30):
        publisher.advance(one, one.output(NewToken("req-7/1", 0, position, 5), None))
        start = pb.AttemptStart(
            key=types_pb2.AttemptKey(request_id=f"other-{position}", attempt=1), choices=[pb.ChoiceStart(choice=0)]
        )
        other = Attempt(start, Outbox("gw-2"), {})
        publisher.advance(other, other.output(NewToken(other.group_id, 0, 0, 5, Finish.STOP), Finish.STOP))
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.flush()
    subscription = await client.jetstream().pull_subscribe(subjects.usage("gw-1"), "reader")
    registers = [pb.UsageRegister.FromString(m.data) for m in await subscription.fetch(2, timeout=5)]
    await client.close()
    assert registers[0].output_position == 1 and registers[1].output_position > 1
    assert publisher.num_open == 1  # the others' are gone
    publisher.hand_off(one)
    assert publisher.num_open == 0


async def test_a_cancel_that_the_brokers_client_swallows_ends_the_publishing() -> None:
    async with stalled_client() as client:
        publisher = UsagePublisher(client, Subjects("usage-stalled"))
        one = attempt()
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 0, 5), None))
        await assert_it_ends(publisher.run(), client)


async def registers_of(client: Client, subjects: Subjects, number: int) -> list[pb.UsageRegister]:
    subscription = await client.jetstream().pull_subscribe(subjects.usage("gw-1"), "reader")
    return [pb.UsageRegister.FromString(m.data) for m in await subscription.fetch(number, timeout=5)]


async def test_a_register_that_could_not_be_published_is_published_later(nats_url: str) -> None:
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-away")
    await ensure_streams(client.jetstream(), subjects)
    async with SilentProxy(nats_url).serving() as proxy:
        publisher = UsagePublisher(await connect(proxy.url, "away"), subjects)
        one = attempt()
        proxy.fall_silent()
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 0, 5), None))
        assert not await publisher.flush()
        assert publisher.num_unsent == 1
        proxy.speak()
        async with asyncio.timeout(20):
            while not await publisher.flush():
                pass
    assert (await registers_of(client, subjects, 1))[0].output_position == 1
    assert publisher.num_unsent == 0
    await client.close()


async def test_registers_that_the_stream_refuses_are_published_once_it_accepts(nats_url: str) -> None:
    """As NATS refuses while its disk is full: here the stream has no room for a register."""
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-full")
    stream = StreamConfig(name=subjects.usage_stream, subjects=[subjects.usage("*")], max_msg_size=1)
    await client.jetstream().add_stream(stream)
    publisher = UsagePublisher(client, subjects)
    ended, one = attempt(), attempt()
    ended.start.key.request_id = "req-8"
    publisher.advance(ended, ended.output(NewToken("req-8/1", 0, 0, 5, Finish.LENGTH), Finish.LENGTH))
    running = asyncio.ensure_future(publisher.run())
    try:
        for position in range(3):
            publisher.advance(one, one.output(NewToken("req-7/1", 0, position, 5), None))
            assert not await publisher.flush()
        assert publisher.num_unsent == 2  # the newest of each choice
        await client.jetstream().update_stream(stream.evolve(max_msg_size=-1))
        async with asyncio.timeout(20):
            while publisher.num_unsent:  # noqa: ASYNC110 -- what runs has no event for it
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    registers = {register.request_id: register for register in await registers_of(client, subjects, 2)}
    assert {key: register.output_position for key, register in registers.items()} == {"req-7": 3, "req-8": 1}
    assert registers["req-8"].cause == pb.FINISH_REASON_LENGTH
    await client.close()


async def test_a_later_attempt_takes_nothing_from_what_an_earlier_one_used(nats_url: str) -> None:
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-attempts")
    await ensure_streams(client.jetstream(), subjects)
    publisher = UsagePublisher(client, subjects)
    first, second = attempt(), attempt()
    for position in range(5):
        finish = Finish.LENGTH if position == 4 else None
        publisher.advance(first, first.output(NewToken("req-7/1", 0, position, 5, finish, num_cached=3), finish))
    second.start.key.attempt = 2
    publisher.advance(second, second.prompt_output(PromptProgress("req-7/2", 1, 0)))
    publisher.forget(second, pb.FINISH_REASON_CANCELLED)
    assert await publisher.flush()
    (register,) = await registers_of(client, subjects, 1)
    await client.close()
    used = (register.num_prompt_tokens, register.num_cached_prompt_tokens, register.output_position)
    assert (used, register.attempt) == ((12, 3, 5), 2)


async def test_a_publication_that_raises_is_a_fault_and_holds_no_permit(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-raises")
    await ensure_streams(client.jetstream(), subjects)
    publisher = UsagePublisher(client, subjects)
    one, num_tries = attempt(), 0

    async def fail(*_: object, **__: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise OSError  # says nothing

    with monkeypatch.context() as patched:
        patched.setattr(client, "publish", fail)
        publisher.advance(one, one.output(NewToken("req-7/1", 0, 0, 5), None))
        assert not await publisher.flush()
    assert (num_tries, publisher._jetstream.publish_async_pending(), publisher.num_unsent) == (1, 0, 1)
    assert await publisher.flush()
    assert (await registers_of(client, subjects, 1))[0].output_position == 1
    await client.close()


async def test_registers_that_nobody_accepts_are_bounded(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_publisher, "MAX_UNSENT_REGISTERS", 10)
    client = await connect(nats_url, "test")
    publisher = UsagePublisher(client, Subjects("usage-no-stream"))
    for number in range(30):
        one = attempt()
        one.start.key.request_id = f"req-{number}"
        publisher.advance(one, one.output(NewToken(one.group_id, 0, 0, 5, Finish.STOP), Finish.STOP))
    assert not await publisher.flush()
    assert publisher.num_unsent == 10
    await client.close()

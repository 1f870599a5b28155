"""Usage registers reach JetStream at the first token, every second and at the end."""

from __future__ import annotations

import asyncio

from tests.support.stalled_broker import assert_it_ends, stalled_client
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


async def test_a_register_that_could_not_be_published_is_published_later(nats_url: str) -> None:
    client = await connect(nats_url, "test")
    subjects = Subjects("usage-away")
    await ensure_streams(client.jetstream(), subjects)
    away = await connect(nats_url, "away")
    await away.close()
    publisher = UsagePublisher(away, subjects)
    one = attempt()
    publisher.advance(one, one.output(NewToken("req-7/1", 0, 0, 5), None))
    await publisher.flush()
    publisher.client = client
    await publisher.flush()
    await client.flush()
    subscription = await client.jetstream().pull_subscribe(subjects.usage("gw-1"), "reader")
    registers = [pb.UsageRegister.FromString(m.data) for m in await subscription.fetch(1, timeout=5)]
    await client.close()
    assert registers[0].output_position == 1

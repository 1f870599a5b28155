"""Requests whose workers die, refuse or are slow: the same tokens come, each once."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.doors import KEY
from tests.support.echo import EchoWorker
from tests.support.echo_control import EchoScheduler
from tests.unit.gateway.inference.conftest import MakeWorld, World, until
from torchrelay.common.errors import DeadlineExceeded, QueueFull, TorchrelayError, Unavailable
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import Cause
from torchrelay.gateway.inference.asgi import Message
from torchrelay.gateway.inference.request import refusal_error, retry_delay_s, run_error

BEARER = f"Bearer {KEY}".encode()
PROMPT = [40, 41, 42, 43, 44, 45, 46]


async def ask(world: World, num_tokens: int, n: int = 1, **fields: object) -> list[list[int]]:
    """The token ids of each choice."""
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": num_tokens, "n": n, "return_token_ids": True, **fields}
    response = await world.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


async def test_the_same_tokens_come_when_the_worker_dies(world: World) -> None:
    first, second = world.workers
    first.pause_at = 10
    asking = asyncio.ensure_future(ask(world, 25))
    await until(lambda: [one.usage.num_output_tokens for one in world.door.intake._requests] == [10])
    await first.kill()
    assert await asking == [world.echoed(PROMPT, 25)]
    request_id = world.doors.opened[0].request_id
    again = [start for role, start in second.starts if role == "prefill"]
    assert [(start.key.attempt, list(start.choices[0].forced_output)) for start in again] == [
        (2, world.echoed(PROMPT, 10))
    ]
    assert list(again[0].prompt) == PROMPT  # never as a longer prompt
    assert again[0].sampling.seed == first.starts[0][1].sampling.seed
    assert list(world.scheduler.admits[1].lost_workers) == ["w0"]
    assert world.scheduler.admits[1].num_forced_tokens == 10
    assert [(one.num_output_tokens, one.cause) for one in world.doors.settled[request_id]] == [(25, Cause.LENGTH)]
    await until(lambda: len(world.scheduler.releases) == 2)
    assert list(world.scheduler.releases[0].lost_workers) == ["w0"]


async def test_each_choice_resumes_by_itself_and_finished_ones_are_left_alone(world: World) -> None:
    first, second = world.workers
    world.model.answer = lambda prompt, seed, choice, position: 0 if (choice, position) == (1, 2) else 50 + position
    eos = world.doors._models["acme/echo"].version.eos_token_ids[0]
    assert eos == 0
    first.pause_at = 6
    asking = asyncio.ensure_future(ask(world, 12, n=3))
    await until(lambda: [one.usage.num_output_tokens for one in world.door.intake._requests] == [6 + 3 + 6])
    await first.kill()
    whole = [50 + position for position in range(12)]
    assert await asking == [whole, [50, 51, 0], whole]
    again = [start for role, start in second.starts if role == "decode"]
    assert [(start.key.attempt, [one.choice for one in start.choices]) for start in again] == [(2, [0]), (3, [2])]


async def test_choices_without_tokens_resume_together(world: World) -> None:
    error = pb.RunError(code=pb.RunError.CODE_LOAD_FAILED, message="the weights did not arrive", lost_worker="w0")
    world.workers[0].errors["prefill"].append(error)
    assert await ask(world, 5, n=2) == [world.echoed(PROMPT, 5, choice) for choice in range(2)]
    assert [len(admit.version.model) > 0 and admit.num_choices for admit in world.scheduler.admits] == [2, 2]
    assert list(world.scheduler.admits[1].lost_workers) == ["w0"]


@pytest.mark.parametrize("code", ["CODE_WRONG_INSTANCE", "CODE_DECODE_LOST", "CODE_PREFILL_LOST"])
async def test_errors_that_another_placement_mends_are_not_seen(world: World, code: pb.RunError.Code) -> None:
    error = pb.RunError(code=pb.RunError.Code.Value(str(code)), message="moved")
    world.workers[0].errors["decode"].append(error)
    assert await ask(world, 8) == [world.echoed(PROMPT, 8)]
    assert len(world.scheduler.admits) == 2


async def test_attempts_are_bounded_and_the_last_error_is_told(make_world: MakeWorld) -> None:
    world = await make_world(max_attempts=3)
    error = pb.RunError(code=pb.RunError.CODE_WRONG_INSTANCE, message="the instance is gone")
    for worker in world.workers:
        worker.errors["decode"] += [error] * 10
    response = await world.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the instance is gone")
    assert len(world.scheduler.admits) == 3
    await until(lambda: not world.doors.reserved and len(world.scheduler.releases) == 3)
    assert world.door.admissions.num_open == 0


async def test_an_error_that_nothing_mends_ends_the_request_and_stops_the_other_worker(world: World) -> None:
    error = pb.RunError(code=pb.RunError.CODE_INTERNAL, message="the engine failed")
    world.workers[0].errors["prefill"].append(error)
    response = await world.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "the engine failed")
    await until(lambda: any(role == "decode" for role, _ in world.workers[0].cancelled))
    await until(lambda: not world.doors.reserved)
    assert next(iter(world.doors.settled.values()))[0].cause == Cause.ERROR


async def test_choices_are_one_request_to_the_limits_and_all_their_tokens_are_reserved(world: World) -> None:
    await ask(world, 5, n=3)
    assert world.doors.admitted == [(len(PROMPT), 15)]


async def test_decoded_tokens_that_overtake_the_first_wait_for_it(world: World) -> None:
    world.workers[0].prefill_delay_s = 0.1
    assert await ask(world, 6, n=2) == [world.echoed(PROMPT, 6, choice) for choice in range(2)]


async def test_prefill_and_decode_on_two_workers_and_prefill_may_leave_after_its_part(world: World) -> None:
    prefill, decode = world.workers
    world.scheduler.prefill_workers, world.scheduler.decode_workers = [prefill], [decode]
    decode.pause_at = 4
    asking = asyncio.ensure_future(ask(world, 9))
    await until(lambda: [one.usage.num_output_tokens for one in world.door.intake._requests] == [4])
    await prefill.kill()
    decode.resume()
    assert await asking == [world.echoed(PROMPT, 9)]
    assert len(world.scheduler.admits) == 1
    starts = dict(prefill.starts + decode.starts)
    assert starts["prefill"].decode.worker_id == "w1"
    assert list(starts["decode"].prompt) == []
    assert (starts["prefill"].instance_id, starts["decode"].instance_id) == ("i-w0", "i-w1")


async def test_a_hand_over_that_fails_after_the_first_token_is_resumed(world: World) -> None:
    prefill, decode = world.workers
    world.scheduler.prefill_workers, world.scheduler.decode_workers = [prefill], [decode]
    prefill.errors["hand-over"] = [pb.RunError(code=pb.RunError.CODE_DECODE_LOST, message="no room")]
    async with asyncio.timeout(10):
        assert await ask(world, 9) == [world.echoed(PROMPT, 9)]
    assert [admit.num_forced_tokens for admit in world.scheduler.admits] == [0, 1]


async def test_a_restarted_scheduler_is_told_what_runs_and_what_waits(world: World) -> None:
    world.workers[0].pause_at = 3
    running = asyncio.ensure_future(ask(world, 6))
    await until(lambda: [one.usage.num_output_tokens for one in world.door.intake._requests] == [3])
    world.scheduler.open_gate.clear()
    waiting = asyncio.ensure_future(ask(world, 2))
    await until(lambda: len(world.scheduler.admits) == 2)
    world.scheduler.admits.clear()
    await world.scheduler.kill()
    await world.scheduler.revive()
    await until(lambda: len(world.scheduler.admits) == 2)
    world.scheduler.open_gate.set()
    assert await waiting == [world.echoed(PROMPT, 2)]
    assert [admit.HasField("current") for admit in world.scheduler.admits] == [True, False]
    assert world.scheduler.admits[0].current.decode.worker_id == "w0"
    assert len(world.scheduler.hellos) == 2
    world.workers[0].resume()
    assert await running == [world.echoed(PROMPT, 6)]


async def test_every_request_gets_its_tokens_whatever_dies_and_comes_back(make_world: MakeWorld) -> None:
    world = await make_world(max_attempts=50)
    world.model.step_s = 0.003
    world.model.answer = lambda prompt, seed, choice, position: (seed * 31 + choice * 7 + position * position) % 300 + 5
    seeds = range(12)
    asking = asyncio.gather(*(ask(world, 200, n=2, seed=seed) for seed in seeds))
    victims: list[EchoWorker | EchoScheduler] = [*world.workers, world.scheduler]
    for victim in victims * 2:
        await asyncio.sleep(0.1)
        await victim.kill()
        await asyncio.sleep(0.02)
        await victim.revive()
    answers = await asking
    for seed, answer in zip(seeds, answers, strict=True):
        assert answer == [
            [world.model.answer([], seed, choice, position) for position in range(200)] for choice in (0, 1)
        ]
    assert len(world.scheduler.hellos) == 3
    assert {role for role, start in world.workers[1].starts if start.key.attempt > 3} == {"prefill", "decode"}
    await until(lambda: world.door.admissions.num_open == 0 and not world.doors.reserved)
    assert all(one.num_output_tokens == 200 for usages in world.doors.settled.values() for one in usages)


async def test_release_tells_where_the_time_went(world: World) -> None:
    world.workers[0].num_cached = 5
    await ask(world, 4)
    await until(lambda: len(world.scheduler.releases) == 1)
    release = world.scheduler.releases[0]
    assert [phase.name for phase in release.phases] == ["prepare", "queue", "first_token", "decode", "prefill"]
    assert all(phase.end_unix_us >= phase.begin_unix_us > 0 for phase in release.phases)
    assert release.ttft_s > 0
    assert release.num_output_tokens == 4
    admit = world.scheduler.admits[0]
    assert (admit.num_prompt_tokens, admit.max_tokens, admit.num_choices) == (len(PROMPT), 4, 1)
    assert next(iter(world.doors.settled.values()))[0].num_cached_prompt_tokens == 5


async def test_a_slow_reader_slows_only_itself(world: World) -> None:
    """What a client leaves unread holds back neither another's stream nor its own worker."""
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 500, "n": 4, "stream": True}
    reads, sent = asyncio.Event(), bytearray()
    incoming: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))
        await reads.wait()  # as uvicorn does while the socket's buffer is full

    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": [(b"authorization", BEARER)]}
    slow = asyncio.ensure_future(world.door.asgi(scope, receive, send))
    for _ in range(3):
        assert await ask(world, 50) == [world.echoed(PROMPT, 50)]
    await until(lambda: 4 * 500 in [release.num_output_tokens for release in world.scheduler.releases])
    assert len(world.doors.settled) == 3 and not slow.done()  # it has not been sent its end
    reads.set()
    await slow
    assert sent.count(b'"finish_reason":null') == 4 * 500


def test_errors_of_scheduler_and_worker_have_their_class() -> None:
    reasons = scheduler_pb2.Refusal
    full = refusal_error(reasons(reason=reasons.REASON_QUEUE_FULL, message="m", retry_after_s=2))
    assert isinstance(full, QueueFull) and full.retry_after_s == 2
    assert isinstance(refusal_error(reasons(reason=reasons.REASON_NO_CAPACITY)), Unavailable)
    assert type(run_error(pb.RunError(code=pb.RunError.CODE_INTERNAL))) is TorchrelayError
    assert isinstance(run_error(pb.RunError(code=pb.RunError.CODE_DEADLINE)), DeadlineExceeded)


def test_retries_wait_longer_each_time() -> None:
    delays = [retry_delay_s(attempt) for attempt in range(2, 8)]
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert delays[-1] == 2.0

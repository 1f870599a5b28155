"""Attempts as the engine and their gateways see them, and the messages of a gateway's stream."""

from __future__ import annotations

import asyncio
import time

import pytest

from torchrelay.common.errors import InvalidRequest
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.control.v1.types_pb2 import EngineProgress
from torchrelay.engine.core import Finish, NewToken
from torchrelay.worker.attempts.attempt import Attempt, dispatch_outputs
from torchrelay.worker.attempts.outbox import Outbox


def start(**changes: object) -> pb.AttemptStart:
    message = pb.AttemptStart(
        key=types_pb2.AttemptKey(request_id="req-1", attempt=2),
        prompt=[5, 6, 7],
        num_prompt_tokens=3,
        sampling=pb.Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=11, max_tokens=8, stop_token_ids=[2]),
        choices=[pb.ChoiceStart(choice=0), pb.ChoiceStart(choice=3, forced_output=[9, 9])],
    )
    message.MergeFrom(pb.AttemptStart(**changes))  # type: ignore[arg-type]
    return message


async def test_group_carries_request_parameters() -> None:
    group = Attempt(start(), Outbox("gw"), {}).group()
    assert (group.group_id, group.prompt, group.num_prompt_tokens) == ("req-1/2", (5, 6, 7), 3)
    assert group.sampling.stop_token_ids == frozenset({2})
    assert [(c.choice, c.forced_output) for c in group.choices] == [(0, ()), (3, (9, 9))]


async def test_a_pooling_that_this_worker_does_not_know_is_refused() -> None:
    unknown = max(types_pb2.Pooling.values()) + 1  # of a newer gateway
    with pytest.raises(InvalidRequest, match=f"this worker does not know pooling {unknown}") as refused:
        Attempt(start(pooling=unknown), Outbox("gw"), {}).group()
    assert refused.value.field == "pooling"


async def test_group_has_the_distinct_tokens_of_the_prompt() -> None:
    assert not Attempt(start(), Outbox("gw"), {}).group().distinct_prompt_tokens
    sampling = pb.Sampling(repetition_penalty=1.3, min_tokens=4)
    group = Attempt(start(sampling=sampling, distinct_prompt_tokens=[5, 6, 7]), Outbox("gw"), {}).group()
    assert list(group.distinct_prompt_tokens) == [5, 6, 7]
    assert (group.sampling.repetition_penalty, group.sampling.min_tokens) == (1.3, 4)


async def test_ignore_eos_keeps_own_stop_tokens() -> None:
    attempt = Attempt(start(sampling=pb.Sampling(ignore_eos=True, stop_token_ids=[5])), Outbox("gw"), {})
    assert attempt.group().sampling.stop_token_ids == frozenset({2, 5})  # the gateway omits the model's


async def test_deadline_is_converted_to_engine_clock() -> None:
    assert Attempt(start(), Outbox("gw"), {}).group().deadline_s is None
    in_an_hour = int((time.time() + 3600) * 1000)
    deadline_s = Attempt(start(deadline_unix_ms=in_an_hour), Outbox("gw"), {}).group().deadline_s
    assert deadline_s is not None and 3000 < deadline_s - time.monotonic() <= 3600
    past = Attempt(start(deadline_unix_ms=1), Outbox("gw"), {}).group().deadline_s
    assert past is not None and past < time.monotonic()


async def test_output_carries_phases_once() -> None:
    attempt = Attempt(start(), Outbox("gw"), {})
    attempt.phases.append(types_pb2.Phase(name="prefill", begin_unix_us=1, end_unix_us=2))
    first = attempt.output(NewToken("req-1/2", 3, 2, 42), None)
    second = attempt.output(NewToken("req-1/2", 3, 3, 2, Finish.STOP), Finish.STOP)
    assert (first.choice, first.first_position, list(first.token_ids)) == (3, 2, [42])
    assert [phase.name for phase in first.phases] == ["prefill"]
    assert first.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert second.finish_reason == pb.FINISH_REASON_STOP and not second.phases
    assert attempt.num_forced(3) == 2


async def test_failure_covers_open_choices_only() -> None:
    attempt = Attempt(start(), Outbox("gw"), {})
    attempt.open_choices.discard(0)
    outputs = attempt.failure(pb.RunError(code=pb.RunError.CODE_DECODE_LOST, message="gone"))
    assert [(o.choice, o.finish_reason, o.error.message) for o in outputs] == [(3, pb.FINISH_REASON_ERROR, "gone")]


async def test_step_outputs_are_one_message_per_gateway() -> None:
    left, right = Outbox("left"), Outbox("right")
    tokens = [pb.ChoiceOutput(choice=i) for i in range(3)]
    dispatch_outputs([(left, tokens[0]), (right, tokens[1]), (left, tokens[2])])
    assert [o.choice for o in (await left.take()).outputs] == [0, 2]
    assert [o.choice for o in (await right.take()).outputs] == [1]
    dispatch_outputs([(left, tokens[1])])
    dispatch_outputs([(left, tokens[0])])
    assert [o.choice for o in (await left.take()).outputs] == [1, 0]  # a slow gateway gets both in one message
    waiting = asyncio.ensure_future(left.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    dispatch_outputs([(left, tokens[2])])
    assert [o.choice for o in (await waiting).outputs] == [2]


async def test_last_beat_is_sent_alone_or_with_outputs() -> None:
    outbox = Outbox("gw")
    outbox.put_beat(EngineProgress(num_advances=1))
    assert await outbox.take() == pb.StepOutput(beat=EngineProgress(num_advances=1))
    outbox.put([pb.ChoiceOutput(choice=0)])
    outbox.put_beat(EngineProgress(num_advances=2))
    outbox.put_beat(EngineProgress(num_advances=3))
    taken = await outbox.take()
    assert taken == pb.StepOutput(outputs=[pb.ChoiceOutput(choice=0)], beat=EngineProgress(num_advances=3))
    outbox.put([pb.ChoiceOutput(choice=1)])
    assert not (await outbox.take()).HasField("beat")

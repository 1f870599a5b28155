"""Requests whose workers die, refuse or are slow still deliver the same tokens, each once."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from starlette.types import Message

from tests.support.echo_services import EchoScheduler
from tests.support.echo_worker import EchoWorker
from tests.support.gateway_ports import KEY
from tests.support.wait import HANG_S, eventually
from tests.unit.gateway.dialects.all_dialects import METADATA, inference_stub
from tests.unit.gateway.inference.test_pipeline import load_tokenizer
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import DeadlineExceeded, QueueFull, TorchrelayError, Unavailable
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.inference.execution.running_request import refusal_error, retry_delay_s, run_error
from torchrelay.gateway.inference.execution.worker_streams import RunStream
from torchrelay.inference.v1 import inference_pb2


async def ask(rig: TokenPathRig, num_tokens: int, n: int = 1, **fields: object) -> list[list[int]]:
    """The token ids of each choice."""
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": num_tokens, "n": n, "return_token_ids": True, **fields}
    response = await rig.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def settled_of(rig: TokenPathRig) -> list[tuple[int, int, int, FinishCause]]:
    return [
        (usage.num_prompt_tokens, usage.num_cached_prompt_tokens, usage.num_output_tokens, usage.cause)
        for usages in rig.ports.settled.values()
        for usage in usages
    ]


async def ask_until(
    rig: TokenPathRig, worker: EchoWorker, num_tokens: int, n: int = 1
) -> asyncio.Task[list[list[int]]]:
    """A request for 25 tokens per choice, which ``worker`` pauses after ``num_tokens`` of each."""
    worker.pause_at = num_tokens
    asking = asyncio.ensure_future(ask(rig, 25, n))
    await eventually(lambda: rig.num_accepted() == [n * num_tokens])
    return asking


async def test_dead_worker_does_not_change_the_tokens(rig: TokenPathRig) -> None:
    first, second = rig.workers
    asking = await ask_until(rig, first, 10)
    await first.kill()
    assert await asking == [rig.echoed(PROMPT, 25)]
    request_id = rig.ports.opened[0].request_id
    again = [start for role, start in second.starts if role == "prefill"]
    assert [(start.key.attempt, list(start.choices[0].forced_output)) for start in again] == [
        (2, rig.echoed(PROMPT, 10))
    ]
    assert list(again[0].prompt) == PROMPT  # never as a longer prompt
    assert again[0].sampling.seed == first.starts[0][1].sampling.seed
    assert list(rig.scheduler.admits[1].lost_workers) == ["w0"]
    assert rig.scheduler.admits[1].num_forced_tokens == 10
    assert [(usage.num_output_tokens, usage.cause) for usage in rig.ports.settled[request_id]] == [
        (25, FinishCause.LENGTH)
    ]
    await eventually(lambda: len(rig.scheduler.releases) == 2)
    assert sorted(release.goes_on for release in rig.scheduler.releases) == [False, True], "a part is no length"


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_long_answer_goes_on_in_attempts_that_are_longer_each(rig: TokenPathRig, logprobs: int | None) -> None:
    """Workers keep KV for an attempt's last token, and few answers are as long as they may be."""
    answers = await ask(rig, 4200, 2, model="long", logprobs=logprobs)
    assert answers == [rig.echoed(PROMPT, 4200, choice) for choice in range(2)]
    limits = [(admitted.num_forced_tokens, admitted.max_tokens) for admitted in rig.scheduler.admits]
    assert sorted(limits) == [(0, 512), (512, 2048), (512, 2048), (2048, 4200), (2048, 4200)]
    assert {start.sampling.max_tokens for _, start in rig.workers[0].starts} == {512, 2048, 4200}
    assert [usage[2:] for usage in settled_of(rig)] == [(4200, FinishCause.LENGTH)] * 2
    await eventually(lambda: len(rig.scheduler.releases) == 5)
    assert sorted(release.goes_on for release in rig.scheduler.releases) == [False] * 2 + [True] * 3
    assert list(rig.ports.released_tokens.values()) == [len(PROMPT) + 2 * 4200]


TOO_LONG = scheduler_pb2.Refusal(reason=scheduler_pb2.Refusal.REASON_TOO_LONG, message="needs more KV")


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    ("num_refused", "limits", "num_tokens"),
    [(1, [512, 2048, 1280, 2048, 4200], 4200), (6, [512, 2048, 1280, 896, 704, 608, 560], 512)],
)
async def test_answer_is_as_long_as_a_pool_holds(
    rig: TokenPathRig, logprobs: int | None, num_refused: int, limits: list[int], num_tokens: int
) -> None:
    worker = rig.workers[0]
    worker.pause_at = 500
    asking = asyncio.ensure_future(ask(rig, 4200, 1, model="long", logprobs=logprobs))
    await eventually(lambda: rig.num_accepted() == [500])
    rig.scheduler.refusals += [TOO_LONG] * num_refused
    worker.resume()
    assert await asking == [rig.echoed(PROMPT, num_tokens)]
    assert [admitted.max_tokens for admitted in rig.scheduler.admits] == limits
    assert settled_of(rig) == [(len(PROMPT), 0, num_tokens, FinishCause.LENGTH)]


async def test_answer_that_was_broken_off_is_not_complete(rig: TokenPathRig) -> None:
    """Its worker was lost, and no other has the KV; nor is a first attempt that no pool holds an answer."""
    asking = await ask_until(rig, rig.workers[0], 5)
    rig.scheduler.refusals.append(TOO_LONG)
    await rig.workers[0].kill()
    with pytest.raises(AssertionError, match="needs more KV"):
        await asking
    assert [usage[2:] for usage in settled_of(rig)] == [(5, FinishCause.ERROR)]
    rig.scheduler.refusals.append(TOO_LONG)
    refused = await rig.http.post("/v1/completions", json={"model": "long", "prompt": PROMPT})
    assert refused.status_code == 503 and refused.json()["error"]["message"] == "needs more KV"


@pytest.mark.parametrize("keeps_prompt", [True, False])
async def test_recalled_attempt_that_has_not_begun_runs_elsewhere(
    rig: TokenPathRig, monkeypatch: pytest.MonkeyPatch, keeps_prompt: bool
) -> None:
    told: list[str] = []
    recall = RunStream.recall

    def note(stream: RunStream, key: types_pb2.AttemptKey) -> None:
        told.append(stream._role)
        recall(stream, key)

    monkeypatch.setattr(RunStream, "recall", note)
    first, second = rig.workers
    first.prefill_delay_s, first.pause_at = 60.0, 1
    asking = asyncio.ensure_future(ask(rig, 25))
    await eventually(lambda: len(first.starts) == 2)
    rig.scheduler.prefill_workers = rig.scheduler.decode_workers = [second]
    rig.scheduler.prompt_source = types_pb2.PromptSource(key=first.starts[0][1].key, worker=first.ref)
    await rig.scheduler.recall(first.starts[0][1].key, keeps_prompt)
    assert await asking == [rig.echoed(PROMPT, 25)]
    assert {start.key.attempt for _, start in second.starts} == {2}
    # The prefill role is still busy with the attempt. The cancel is for workers that do not know recalls.
    await eventually(lambda: [role for role, _ in first.cancelled] == ["decode"])
    assert [role for role, _ in first.recalled] == (["decode"] if keeps_prompt else [])
    assert told == (["prefill", "decode"] if keeps_prompt else []), "the prefill worker first"
    source_of = {role: start.prompt_source for role, start in second.starts}
    assert source_of == {"prefill": rig.scheduler.prompt_source, "decode": types_pb2.PromptSource()}
    assert second.starts[0][1].sampling.seed == first.starts[0][1].sampling.seed
    assert list(rig.scheduler.admits[1].lost_workers) == []
    await eventually(lambda: len(rig.scheduler.releases) == 2)
    assert [(release.is_recalled, release.ttft_s > 0) for release in rig.scheduler.releases] == [
        (True, False),
        (False, True),
    ]


async def test_recalled_attempt_that_has_begun_goes_on(rig: TokenPathRig) -> None:
    first, _ = rig.workers
    asking = await ask_until(rig, first, 10)
    await rig.scheduler.recall(first.starts[0][1].key)
    second = asyncio.ensure_future(ask(rig, 1))  # what comes after it on the stream
    await second
    first.resume()
    assert await asking == [rig.echoed(PROMPT, 25)]
    assert [admit.key.attempt for admit in rig.scheduler.admits] == [1, 1]


@pytest.mark.parametrize("how", ["silent", "stalled"])
async def test_hung_worker_does_not_change_the_tokens(rig: TokenPathRig, how: str) -> None:
    first, second = rig.workers
    asking = await ask_until(rig, first, 10)
    if how == "silent":
        first.is_silent = True
    else:
        first.progress = types_pb2.EngineProgress(num_advances=1, has_work=True)
    await eventually(lambda: bool(second.starts))
    first.is_silent = False
    first.resume()  # it goes on; nobody listens to it any more
    assert await asking == [rig.echoed(PROMPT, 25)]
    assert list(rig.scheduler.admits[1].lost_workers) == ["w0"]
    assert [usage[2:] for usage in settled_of(rig)] == [(25, FinishCause.LENGTH)]
    await eventually(lambda: first.num_running == 0)


async def test_unfinished_choices_resume_separately(rig: TokenPathRig) -> None:
    first, second = rig.workers
    rig.model.answer = lambda prompt, seed, choice, position: 0 if (choice, position) == (1, 2) else 50 + position
    eos = rig.ports.published["acme/echo"].version.eos_token_ids[0]
    assert eos == 0
    first.pause_at = 6
    asking = asyncio.ensure_future(ask(rig, 12, n=3))
    await eventually(lambda: rig.num_accepted() == [6 + 3 + 6])
    await first.kill()
    whole = [50 + position for position in range(12)]
    assert await asking == [whole, [50, 51, 0], whole]
    again = [start for role, start in second.starts if role == "decode"]
    assert [(start.key.attempt, [choice.choice for choice in start.choices]) for start in again] == [(2, [0]), (3, [2])]


async def test_choices_without_tokens_resume_together(rig: TokenPathRig) -> None:
    error = pb.RunError(code=pb.RunError.CODE_LOAD_FAILED, message="the weights did not arrive", lost_worker="w0")
    rig.workers[0].errors["prefill"].append(error)
    assert await ask(rig, 5, n=2) == [rig.echoed(PROMPT, 5, choice) for choice in range(2)]
    assert [len(admit.version.model) > 0 and admit.num_choices for admit in rig.scheduler.admits] == [2, 2]
    assert list(rig.scheduler.admits[1].lost_workers) == ["w0"]


@pytest.mark.parametrize("code", ["CODE_WRONG_INSTANCE", "CODE_DECODE_LOST", "CODE_PREFILL_LOST"])
async def test_retriable_errors_are_not_seen(rig: TokenPathRig, code: pb.RunError.Code) -> None:
    error = pb.RunError(code=pb.RunError.Code.Value(str(code)), message="moved")
    rig.workers[0].errors["decode"].append(error)
    assert await ask(rig, 8) == [rig.echoed(PROMPT, 8)]
    assert len(rig.scheduler.admits) == 2


async def test_attempts_are_bounded_and_the_last_error_returned(make_rig: MakeRig) -> None:
    rig = await make_rig(max_attempts=3)
    error = pb.RunError(code=pb.RunError.CODE_LOAD_FAILED, message="the instance is gone")
    for worker in rig.workers:
        worker.errors["decode"] += [error] * 10
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the instance is gone")
    assert len(rig.scheduler.admits) == 3
    await eventually(lambda: not rig.ports.reserved and len(rig.scheduler.releases) == 3)
    assert rig.token_path.admissions.num_open == 0


async def test_answer_whose_slot_is_taken_again_and_again_goes_on(make_rig: MakeRig) -> None:
    rig = await make_rig(max_attempts=2)
    error = pb.RunError(code=pb.RunError.CODE_WRONG_INSTANCE, message="the instance was unloaded")
    rig.workers[0].errors["hand-over"] = [error] * 6  # each after a token
    async with asyncio.timeout(HANG_S):
        assert await ask(rig, 9) == [rig.echoed(PROMPT, 9)]
    assert [admit.num_forced_tokens for admit in rig.scheduler.admits] == [*range(7)]


async def test_final_error_ends_the_request_at_both_workers(rig: TokenPathRig) -> None:
    error = pb.RunError(code=pb.RunError.CODE_INTERNAL, message="the engine failed")
    rig.workers[0].errors["prefill"].append(error)
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "the engine failed")
    await eventually(lambda: any(role == "decode" for role, _ in rig.workers[0].cancelled))
    await eventually(lambda: not rig.ports.reserved)
    assert next(iter(rig.ports.settled.values()))[0].cause == FinishCause.ERROR


async def test_format_that_allows_no_token_is_the_callers_fault(rig: TokenPathRig) -> None:
    """Clients repeat a 500 by themselves, and would pay each time."""
    error = pb.RunError(code=pb.RunError.CODE_FORMAT, message="the format allows no token")
    rig.workers[0].errors["prefill"].append(error)
    body = {"model": "echo", "prompt": "a", "guided_regex": "[a-z]{3}"}
    response = await rig.http.post("/v1/completions", json=body)
    said = response.json()["error"]
    assert (response.status_code, said["param"], said["message"]) == (400, "guided_regex", error.message)


async def test_decoded_tokens_wait_for_the_first_token_and_limits_count_one_request(rig: TokenPathRig) -> None:
    rig.workers[0].prefill_delay_s = 0.1
    assert await ask(rig, 6, n=2) == [rig.echoed(PROMPT, 6, choice) for choice in range(2)]
    assert rig.ports.admitted == [(len(PROMPT), 12)], "the tokens of all choices"


async def test_prefill_worker_may_leave_after_the_first_token(rig: TokenPathRig) -> None:
    prefill, decode = rig.workers
    rig.scheduler.prefill_workers, rig.scheduler.decode_workers = [prefill], [decode]
    decode.pause_at = 4
    asking = asyncio.ensure_future(ask(rig, 9))
    await eventually(lambda: rig.num_accepted() == [4])
    await prefill.kill()
    decode.resume()
    assert await asking == [rig.echoed(PROMPT, 9)]
    assert len(rig.scheduler.admits) == 1
    starts = dict(prefill.starts + decode.starts)
    assert starts["prefill"].decode.worker_id == "w1"
    assert list(starts["decode"].prompt) == []
    assert (starts["prefill"].instance_id, starts["decode"].instance_id) == ("i-w0", "i-w1")


async def test_hand_over_that_fails_late_is_resumed(rig: TokenPathRig) -> None:
    prefill, decode = rig.workers
    rig.scheduler.prefill_workers, rig.scheduler.decode_workers = [prefill], [decode]
    prefill.errors["hand-over"] = [pb.RunError(code=pb.RunError.CODE_DECODE_LOST, message="no free pages")]
    async with asyncio.timeout(HANG_S):
        assert await ask(rig, 9) == [rig.echoed(PROMPT, 9)]
    assert [admit.num_forced_tokens for admit in rig.scheduler.admits] == [0, 1]


async def test_restarted_scheduler_gets_running_and_waiting_requests(rig: TokenPathRig) -> None:
    rig.workers[0].pause_at = 3
    running = asyncio.ensure_future(ask(rig, 6))
    await eventually(lambda: rig.num_accepted() == [3])
    rig.scheduler.open_gate.clear()
    waiting = asyncio.ensure_future(ask(rig, 2))
    await eventually(lambda: len(rig.scheduler.admits) == 2)
    rig.scheduler.admits.clear()
    await rig.scheduler.kill()
    await rig.scheduler.revive()
    await eventually(lambda: len(rig.scheduler.admits) == 2)
    rig.scheduler.open_gate.set()
    assert await waiting == [rig.echoed(PROMPT, 2)]
    assert [admit.HasField("current") for admit in rig.scheduler.admits] == [True, False]
    assert rig.scheduler.admits[0].current.decode.worker_id == "w0"
    assert len(rig.scheduler.hellos) == 2
    rig.workers[0].resume()
    assert await running == [rig.echoed(PROMPT, 6)]


async def test_requests_get_all_tokens_through_repeated_failures(make_rig: MakeRig) -> None:
    rig = await make_rig(max_attempts=50)
    rig.model.step_s = 0.003
    rig.model.answer = lambda prompt, seed, choice, position: (seed * 31 + choice * 7 + position * position) % 300 + 5
    seeds = range(12)
    asking = asyncio.gather(*(ask(rig, 200, n=2, seed=seed) for seed in seeds))
    await eventually(lambda: len(rig.num_accepted()) == len(seeds))
    victims: list[EchoWorker | EchoScheduler] = [*rig.workers, rig.scheduler]
    for victim in victims * 2:
        num_before, num_hellos = sum(rig.num_accepted()), len(rig.scheduler.hellos)
        await eventually(lambda num=num_before: sum(rig.num_accepted()) > num + 50)  # type: ignore[misc]
        await victim.kill()
        await victim.revive()
        if victim is rig.scheduler:
            await eventually(lambda num=num_hellos: len(rig.scheduler.hellos) > num)  # type: ignore[misc]
    answers = await asking
    for seed, answer in zip(seeds, answers, strict=True):
        assert answer == [
            [rig.model.answer([], seed, choice, position) for position in range(200)] for choice in (0, 1)
        ]
    assert len(rig.scheduler.hellos) == 3
    assert {role for role, start in rig.workers[1].starts if start.key.attempt > 3} == {"prefill", "decode"}
    await eventually(lambda: rig.token_path.admissions.num_open == 0 and not rig.ports.reserved)
    assert all(usage.num_output_tokens == 200 for usages in rig.ports.settled.values() for usage in usages)


async def test_release_reports_why_an_attempt_failed(rig: TokenPathRig) -> None:
    asking = await ask_until(rig, rig.workers[0], 10)
    await rig.workers[0].kill()
    await asking
    await eventually(lambda: len(rig.scheduler.releases) == 2)
    errors = [[each.detail for each in release.phases if each.name == "error"] for release in rig.scheduler.releases]
    assert errors == [["worker w0 was lost"], []]


async def test_release_reports_the_phases(rig: TokenPathRig) -> None:
    rig.workers[0].num_cached = 5
    await ask(rig, 4)
    await eventually(lambda: len(rig.scheduler.releases) == 1)
    release = rig.scheduler.releases[0]
    assert [phase.name for phase in release.phases] == ["prepare", "queue", "first_token", "decode", "prefill"]
    assert all(phase.end_unix_us >= phase.begin_unix_us > 0 for phase in release.phases)
    assert release.ttft_s > 0
    assert release.num_output_tokens == 4
    admit = rig.scheduler.admits[0]
    assert (admit.num_prompt_tokens, admit.max_tokens, admit.num_choices) == (len(PROMPT), 4, 1)
    assert rig.ports.opened[0].opened_unix_us == release.phases[0].begin_unix_us  # before it is prepared
    assert next(iter(rig.ports.settled.values()))[0].num_cached_prompt_tokens == 5


async def test_slow_reader_slows_only_itself(rig: TokenPathRig) -> None:
    """A client that does not read delays neither another's stream nor its own worker."""
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 500, "n": 4, "stream": True}
    reads, sent = asyncio.Event(), bytearray()
    encoded = json.dumps(body).encode()
    incoming: list[Message] = [{"type": "http.request", "body": encoded}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))
        await reads.wait()  # as uvicorn does while the socket's buffer is full

    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-length", str(len(encoded)).encode())]
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers}
    slow = asyncio.ensure_future(rig.token_path.apps["/v1/completions"](scope, receive, send))
    for _ in range(3):
        assert await ask(rig, 50) == [rig.echoed(PROMPT, 50)]
    await eventually(lambda: 4 * 500 in [release.num_output_tokens for release in rig.scheduler.releases])
    assert len(rig.ports.settled) == 3 and not slow.done()  # its end has not been sent
    reads.set()
    await slow
    assert sent.count(b'"finish_reason":null') == 4 * 500


def test_errors_are_mapped_and_retry_delays_grow() -> None:
    reasons = scheduler_pb2.Refusal
    full = refusal_error(reasons(reason=reasons.REASON_QUEUE_FULL, message="m", retry_after_s=2))
    assert isinstance(full, QueueFull) and full.retry_after_s == 2
    for reason, field in ((reasons.REASON_NO_CAPACITY, "model"), (reasons.REASON_LOAD_FAILED, None)):
        timed = refusal_error(reasons(reason=reason, message="m", retry_after_s=9))
        assert isinstance(timed, Unavailable) and (timed.field, timed.retry_after_s) == (field, 9)
        untimed = refusal_error(reasons(reason=reason, message="m"))
        assert isinstance(untimed, Unavailable) and untimed.retry_after_s is None
    assert type(run_error(pb.RunError(code=pb.RunError.CODE_INTERNAL))) is TorchrelayError
    assert isinstance(run_error(pb.RunError(code=pb.RunError.CODE_DEADLINE)), DeadlineExceeded)
    delays = [retry_delay_s(attempt) for attempt in range(2, 8)]
    assert (delays[0], delays[-1]) == (0, 2.0) and delays == sorted(delays)


@pytest.mark.parametrize("is_cold", [False, True])
async def test_client_that_leaves_pays_the_computed_prompt(rig: TokenPathRig, is_cold: bool) -> None:
    if is_cold:
        rig.scheduler.open_gate.clear()
    else:
        rig.workers[0].prompt_progress, rig.workers[0].num_cached = (4, 6), 2
    body = {"model": "echo", "prompt": PROMPT, "stream": True}
    async with rig.http.stream("POST", "/v1/completions", json=body) as reply:
        await anext(reply.aiter_lines())  # a keep-alive, after the worker's progress
    await eventually(lambda: bool(rig.ports.settled))
    assert settled_of(rig) == [(0, 0, 0, FinishCause.CANCELLED) if is_cold else (6, 2, 0, FinishCause.CANCELLED)]


# At the caller's deadline its own timer may cancel the call before the gateway's timer ends it.
@pytest.mark.parametrize(
    ("callers_s", "operators_s", "expected", "causes"),
    [(1.0, 60.0, [6, 2, 0], {FinishCause.ERROR, FinishCause.CANCELLED}), (60.0, 1.0, [0, 0, 0], {FinishCause.ERROR})],
)
async def test_only_callers_deadline_bills_the_computed_prompt(
    make_rig: MakeRig, callers_s: float, operators_s: float, expected: list[int], causes: set[FinishCause]
) -> None:
    """Otherwise cached tokens are not billed either: without the prompt's tokens they would reduce the bill."""
    rig = await make_rig(request_timeout_s=operators_s)
    await load_tokenizer(rig)
    rig.workers[0].prompt_progress, rig.workers[0].num_cached = (4, 6), 2
    made = inference_pb2.GenerateRequest(model="echo", prompt_token_ids=inference_pb2.TokenIds(ids=PROMPT))
    async with inference_stub(rig) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(made, metadata=METADATA, timeout=callers_s)))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: bool(rig.ports.settled))
    [(*billed, cause)] = settled_of(rig)
    assert billed == expected and cause in causes


async def test_platform_fault_during_a_prompt_bills_nothing(make_rig: MakeRig) -> None:
    rig = await make_rig(max_attempts=1)
    rig.workers[0].prompt_progress = (4, 6)
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT}))
    await eventually(lambda: any(role == "prefill" for role, _ in rig.workers[0].starts))
    await rig.workers[0].kill()
    assert (await asking).status_code == 503
    await eventually(lambda: bool(rig.ports.settled))
    assert [usage[0] for usage in settled_of(rig)] == [0]

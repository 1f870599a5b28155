"""Prefill and decode with real engines: exact tokens, and no leaks however an attempt ends."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from typing import Any
from weakref import ref

import pytest
from tokenizers import Tokenizer

from tests.integration.roles_testbed import DECODE, PREFILL, Make, paused
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, prompt_of
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import decode_pb2, types_pb2
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1.decode_pb2_grpc import DecodeStub
from torchrelay.control.v1.prefill_pb2_grpc import PrefillStub
from torchrelay.engine.core import StepResult
from torchrelay.engine.kernels.low_rank import Adapter
from torchrelay.worker.attempts.attempt import group_id_of
from torchrelay.worker.attempts.hosted_adapters import HostedAdapters, Reserve

PROMPT = prompt_of(70)


@pytest.mark.parametrize("apart", [True, False], ids=["two workers", "one worker"])
async def test_tokens_equal_the_reference_and_nothing_is_left(scene_of: Make, model: Model, apart: bool) -> None:
    async with scene_of(apart=apart) as scene:
        prompts = [prompt_of(length, salt) for salt, length in enumerate((1, 33, 64, 150))]
        requests = [await scene.send(scene.request(prompt)) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            await request.finished()
            assert request.tokens() == model.expected(prompt)
            assert request.finish() == pb.FINISH_REASON_LENGTH
        resumed = scene.request(PROMPT, forced=model.expected(PROMPT)[:9])
        await (await scene.send(resumed)).finished()
        assert resumed.tokens() == model.expected(PROMPT)[9:]
        await scene.assert_idle()


@pytest.mark.parametrize("apart", [True, False], ids=["two workers", "one worker"])
async def test_stop_string_from_the_first_token_ends_a_cold_request(
    scene_of: Make, model: Model, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """The decode role must have its checker before the first token reaches it, tokenizer still unread or not."""
    prompt, letters = _prompt_with_printable_begin(model)
    async with scene_of(apart=apart) as scene:
        read = scene.decode.worker.tokenizers.read

        async def read_slowly(digest: str) -> bytes:
            if apart:  # a worker of both roles begins the prompt with its decode role alone
                metrics = scene.prefill.worker.step_metrics
                await eventually(lambda: metrics.num_positions_prefilled >= len(prompt), "the prefill")
            return await read(digest)

        monkeypatch.setattr(scene.decode.worker.tokenizers, "read", read_slowly)
        for num_letters in (2, 1, 3):
            request = await scene.send(scene.request(prompt, stop_strings=[letters[:num_letters]]))
            await request.finished()
            assert request.finish() == pb.FINISH_REASON_STOP
            assert request.tokens() == model.expected(prompt)[:num_letters]
        await scene.assert_idle()


@pytest.mark.parametrize("apart", [True, False], ids=["two workers", "one worker"])
async def test_progress_of_a_long_prompt_is_reported(scene_of: Make, apart: bool) -> None:
    """The gateway bills it if its client leaves, the sweep if the gateway dies; a dropped stream is both here."""
    async with scene_of(apart=apart) as scene:
        worker = scene.prefill.worker
        registers = await worker.usage.client.subscribe(Subjects(worker.settings.nats_prefix).usage("gw-1"))
        request = await scene.send(scene.request(prompt_of(400), max_tokens=1))
        await request.finished()
        told = [output.num_prompt_tokens for output in request.outputs() if not output.token_ids]
        assert told == list(range(48, 400, 48))  # a step computes 48 positions
        cancelled = await scene.send(scene.request(prompt_of(480, 1), max_tokens=30))
        await eventually(lambda: bool(cancelled.outputs()))
        await cancelled.cancel()
        await scene.assert_idle()
        told = [output.num_prompt_tokens for output in cancelled.outputs() if not output.token_ids]
        register = pb.UsageRegister()
        async with asyncio.timeout(HANG_S):
            while register.request_id != cancelled.start.key.request_id or register.num_prompt_tokens < told[-1]:
                register = pb.UsageRegister.FromString((await registers.next_msg(timeout=HANG_S)).data)
    assert told[0] == 48
    assert register.num_prompt_tokens <= 480


@pytest.mark.parametrize("apart", [True, False], ids=["two workers", "one worker"])
async def test_tokenizer_panic_ends_the_request_with_the_cause(
    scene_of: Make, model: Model, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """Only requests with stop strings need the tokenizer; tokens before the fault are delivered, nothing is left."""
    expected, letters = model.expected(PROMPT), _printable(model)
    place = next(i for i, token in enumerate(expected) if i >= 2 and token in letters and token not in expected[:i])
    # Stripped from both ends, a token of this one character is less than empty, at which the library panics.
    fields = json.loads((model.folder / "tokenizer.json").read_bytes())
    strip = {"type": "Strip", "content": letters[expected[place]], "start": 1, "stop": 1}
    fields["decoder"] = {"type": "Sequence", "decoders": [strip, fields["decoder"]]}

    async def read(digest: str) -> bytes:
        return json.dumps(fields).encode()

    async with scene_of(apart=apart) as scene:
        for worker in (scene.prefill, scene.decode):
            monkeypatch.setattr(worker.worker.tokenizers, "read", read)
        neighbour = await scene.send(scene.request(PROMPT))
        request = await scene.send(scene.request(PROMPT, stop_strings=["never to be seen"]))
        await request.finished()
        assert request.tokens() == expected[:place]
        assert "the model's tokenizer failed to decode its tokens" in request.error().message
        await neighbour.finished()
        assert neighbour.tokens() == expected
        await scene.assert_idle()


async def test_cancel_at_any_moment_frees_all_pages(scene_of: Make, model: Model) -> None:
    moments = random.Random(5)
    async with scene_of(decode_pool_bytes=1 << 20) as scene:
        requests = []
        for salt in range(24):
            request = await scene.send(
                scene.request(prompt_of(20 + salt * 9, salt), num_choices=1 + salt % 3, max_tokens=60)
            )
            requests.append(request)
            await asyncio.sleep(moments.random() * 0.03)
            if salt % 4:
                await requests[moments.randrange(len(requests))].cancel()
        for request in requests:
            await request.cancel()
        await scene.assert_idle()
        again = await scene.send(scene.request(PROMPT))
        await again.finished()
        assert again.tokens() == model.expected(PROMPT)
        await scene.assert_idle()


@pytest.mark.parametrize("apart", [True, False], ids=["two workers", "one worker"])
async def test_cancel_right_after_the_start_leaves_nothing(scene_of: Make, apart: bool) -> None:
    async with scene_of(apart=apart, start_timeout_s=1.0) as scene:
        prefill, decode = scene.streams
        for order in (0, 1, 2):
            for _ in range(4):
                request = scene.request(PROMPT, max_tokens=300)
                await prefill.send(scene.for_prefill(request))
                if order == 1:
                    await decode.send(scene.for_decode(request))
                await prefill.cancel(request.start.key)
                if order == 2:
                    await decode.send(scene.for_decode(request))
                    await decode.cancel(request.start.key)
                await decode.cancel(request.start.key)
        await scene.assert_idle()


async def test_end_of_a_gateway_leaves_other_attempts(scene_of: Make, model: Model) -> None:
    async with scene_of() as scene:
        others = await scene.connect("gw-2")
        mine = await scene.send(scene.request(PROMPT, max_tokens=300))
        theirs = await scene.send(scene.request(PROMPT, streams=others, max_tokens=120))
        await eventually(lambda: len(mine.tokens()) > 2 and len(theirs.tokens()) > 2)
        for stream in scene.streams:
            await stream.close()
        await theirs.finished()
        assert theirs.tokens() == model.expected(PROMPT, 120)
        await scene.assert_idle()


async def test_refusing_decode_worker_is_not_reported_lost(scene_of: Make) -> None:
    async with scene_of() as scene:
        request = scene.request(PROMPT)
        await scene.decode.unload()
        await scene.decode.until_free()
        await scene.streams[0].send(scene.for_prefill(request))
        await request.finished()
        assert request.error().code == pb.RunError.CODE_DECODE_LOST
        assert scene.decode.worker.settings.worker_id in request.error().message
        assert request.error().lost_worker == ""
        await scene.prefill.assert_idle()


async def test_unloaded_base_leaves_no_adapter_in_memory(scene_of: Make) -> None:
    async def read(_digest: str) -> bytes:
        return b""

    read_adapters: list[ref[Adapter]] = []

    async def made(adapter_id: str, document: bytes, weights: bytes, reserve: Reserve) -> Adapter:
        adapter = Adapter(adapter_id, (), 10)
        read_adapters.append(ref(adapter))
        return adapter

    async with scene_of() as scene:
        adapters = scene.decode.worker.adapters = HostedAdapters(read)
        await adapters.get(scene.decode.instance_id, types_pb2.Adapter(adapter_id="a"), made)
        (adapter,) = read_adapters
        assert adapter() is not None
        await scene.decode.unload()
        await scene.decode.until_free()
        assert adapter() is None


async def test_start_that_reads_for_longer_than_an_offer_waits_is_awaited(
    scene_of: Make, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter may take a minute to read; the KV was refused after ten seconds."""

    async def got(_instance_id: str, wanted: types_pb2.Adapter, *_: object) -> None:
        if wanted.adapter_id == "slow":
            await asyncio.sleep(3.0)  # a slow store

    async with scene_of(start_timeout_s=0.3, kv_timeout_s=2.0) as scene:
        for worker in (scene.prefill, scene.decode):
            monkeypatch.setattr(worker.worker.adapters, "get", got)
        request = scene.request(PROMPT)
        for stream, start, adapter_id in zip(
            reversed(scene.streams),
            (scene.for_decode(request), scene.for_prefill(request)),
            ("slow", "quick"),
            strict=True,
        ):
            start.adapter.adapter_id = adapter_id
            await stream.send(start)
        await request.finished()
        assert request.tokens() == model.expected(PROMPT)
        ending = scene.request(PROMPT)
        await scene.streams[0].send(scene.for_prefill(ending))
        start = scene.for_decode(ending)
        start.adapter.adapter_id = "slow"
        await scene.streams[1].send(start)
        await eventually(lambda: scene.decode.worker.roles[1].num_awaited_starts > 0)
        await scene.streams[1].cancel(ending.start.key)
        await ending.finished()
        assert "ended before it started" in ending.error().message


async def test_a_start_is_awaited_though_another_that_awaits_it_is_cancelled(scene_of: Make) -> None:
    """The cancelled call took away the future of the other, which waited until its limit and then for ever."""
    async with scene_of(start_timeout_s=HANG_S) as scene:
        request, role = scene.request(PROMPT), scene.decode.worker.roles[1]
        first, second = (asyncio.ensure_future(role.wait_for_start(group_id_of(request.start.key))) for _ in range(2))
        await eventually(lambda: role.num_awaited_starts > 0)
        first.cancel()
        await asyncio.wait((first,))
        assert role.num_awaited_starts == 1
        await scene.send(request)
        attempt = await second
        assert attempt.is_started
        await request.finished()
        await scene.assert_idle()


async def test_lost_prefill_worker_is_reported_by_the_decode_worker(scene_of: Make) -> None:
    async with scene_of() as scene:
        decode_role: Any = scene.decode.worker.roles[1]
        may_receive, offered = asyncio.Event(), asyncio.Event()
        receive = decode_role._receive_kv

        async def received_later(*arguments: Any) -> None:
            offered.set()
            await may_receive.wait()
            await receive(*arguments)

        decode_role._receive_kv = received_later  # otherwise a quick machine has all KV before the loss
        request = await scene.send(scene.request(prompt_of(400), max_tokens=20))
        async with asyncio.timeout(HANG_S):
            await offered.wait()
        await scene.prefill.unload()
        may_receive.set()
        await request.finished()
        assert request.error().code in (pb.RunError.CODE_PREFILL_LOST, pb.RunError.CODE_WRONG_INSTANCE)
        await scene.decode.assert_idle()


async def test_hung_prefill_worker_is_reported_by_the_decode_worker(scene_of: Make) -> None:
    """A stopped process still takes connections, and says nothing."""
    async with scene_of() as scene:
        request = scene.request(PROMPT)
        offered = scene.for_prefill(request)
        await request.streams[1].send(scene.for_decode(request))
        with socket.create_server(("127.0.0.1", 0)) as hung:
            source = types_pb2.Source(
                holder_id=offered.kv_ticket.holder_id,
                data_address=f"127.0.0.1:{hung.getsockname()[1]}",
                ticket=offered.kv_ticket,
            )
            offer = decode_pb2.KvOffer(
                key=offered.key,
                instance_id=scene.decode.instance_id,
                pack_id=scene.version.pack_id,
                sequences=[decode_pb2.KvSequence(choices=[0], num_context_tokens=len(PROMPT))],
                source=source,
                block_tokens=scene.prefill.worker.settings.kv_block_tokens,
            )
            async with open_channel(scene.decode.address, token=scene.decode.token) as channel:
                await DecodeStub(channel).Receive(offer)
            await request.finished()  # while the connection is still open
        assert request.error().code == pb.RunError.CODE_PREFILL_LOST
        await scene.decode.assert_idle()


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_run_stream_carries_beats_from_its_start(scene_of: Make, role: types_pb2.Role.ValueType) -> None:
    async with scene_of() as scene, open_channel(scene.prefill.address, token=scene.prefill.token) as channel:
        call: Any = (PrefillStub if role == PREFILL else DecodeStub)(channel).Run()
        await call.write(pb.RunCommand(hello=pb.RunHello(gateway_id="gw-2", beat_every_s=0.1)))
        first, second = (await call.read(), await call.read())
        assert not first.beat.has_work and first.beat.num_advances == second.beat.num_advances > 0
        await (await scene.send(scene.request(PROMPT))).finished()
        async with asyncio.timeout(HANG_S):
            while (await call.read()).beat.num_advances == first.beat.num_advances:
                pass
        may_end = threading.Event()
        scene.prefill.worker.engine.post(may_end.wait)
        async with asyncio.timeout(HANG_S):
            while not (stuck := await call.read()).beat.has_work:
                pass
        assert (await call.read()).beat == stuck.beat
        may_end.set()
        call.cancel()


async def test_engine_ends_an_attempt_at_its_deadline(scene_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the event loop's own timer is."""
    async with scene_of() as scene:
        instance = scene.decode.worker.engine.relay_instance
        assert instance is not None
        step, num_tokens = instance.step, 0

        def step_before_the_deadline() -> StepResult:
            nonlocal num_tokens
            result = step()
            num_tokens += len(result.tokens)
            if num_tokens > 2:
                monkeypatch.setattr(instance._interruptions, "_clock", lambda: time.monotonic() + 7_200)
            return result

        monkeypatch.setattr(instance, "step", step_before_the_deadline)
        deadline_unix_ms = int(time.time() * 1000) + 3_600_000
        request = await scene.send(scene.request(PROMPT, max_tokens=400, deadline_unix_ms=deadline_unix_ms))
        await request.finished()
        assert request.error().code == pb.RunError.CODE_DEADLINE and len(request.tokens()) == 1 + 3
        await request.cancel()  # as its gateway does
        await scene.assert_idle()


async def test_attempt_ends_at_its_deadline_though_the_engines_hang(scene_of: Make) -> None:
    async with scene_of() as scene:
        with paused(scene.prefill), paused(scene.decode):
            deadline_unix_ms = int(time.time() * 1000) + 50
            request = await scene.send(scene.request(PROMPT, deadline_unix_ms=deadline_unix_ms))
            await request.finished()
            assert request.error().code == pb.RunError.CODE_DEADLINE and not request.tokens()
        await scene.assert_idle()


@pytest.mark.parametrize("apart", [True, False], ids=["two workers", "one worker"])
async def test_recall_that_crosses_the_first_token_ends_the_answer(scene_of: Make, apart: bool) -> None:
    async with scene_of(apart=apart) as scene:
        request = await scene.send(scene.request(PROMPT, max_tokens=400))
        await eventually(lambda: len(request.outputs()) > 2, "tokens of the decode role")
        decode = scene.decode.worker
        with paused(scene.decode):
            await request.recall()
            await eventually(lambda: not any(role.attempts for role in decode.roles), "the end of the attempt")
        await scene.assert_idle()
        assert decode.step_metrics.num_positions_decoded < 399


async def test_request_waiting_for_pages_runs_once_they_are_free(scene_of: Make, model: Model) -> None:
    """Pages of a group that only prefills here come free without any decode attempt ending."""
    async with scene_of(decode_pool_bytes=1 << 20) as scene:
        requests = [await scene.send(scene.request(prompt_of(60, salt), max_tokens=300)) for salt in range(5)]
        for salt, request in enumerate(requests):
            await request.finished()
            assert request.tokens()[:30] == model.expected(prompt_of(60, salt), 30)
        await scene.assert_idle()


async def test_unexpected_error_in_a_start_fails_its_attempt_alone(
    scene_of: Make, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_of() as scene:
        good = await scene.send(scene.request(PROMPT, max_tokens=60))
        bad = scene.request(PROMPT, stop_strings=["x"])

        async def broken(*_: object) -> None:
            raise ValueError("a tokenizer that nobody thought of")

        for worker in (scene.prefill, scene.decode):
            monkeypatch.setattr(worker.worker.tokenizers, "read", broken)
        await scene.send(bad)
        await bad.finished()
        assert bad.error().code == pb.RunError.CODE_INTERNAL
        await good.finished()
        assert good.tokens() == model.expected(PROMPT, 60)
        await scene.assert_idle()


async def test_shutdown_ends_running_attempts(scene_of: Make) -> None:
    async with asyncio.timeout(HANG_S), scene_of(decode_pool_bytes=1 << 20, start_timeout_s=600.0) as scene:
        for salt in range(8):
            await scene.send(scene.request(prompt_of(60, salt), max_tokens=400))
        orphan = scene.request(PROMPT)  # its decode worker never hears of it, and lets the offer wait
        await scene.streams[0].send(scene.for_prefill(orphan))
        await eventually(lambda: scene.decode.worker.roles[1].num_awaited_starts > 0)


def _prompt_with_printable_begin(model: Model) -> tuple[tuple[int, ...], str]:
    """A prompt whose greedy continuation begins with three different printable ASCII letters; and those."""
    letters = _printable(model)
    texts = prompts = [prompt_of(40, salt) for salt in range(200)]
    for _ in range(3):
        nexts = model.logits(*texts).argmax(-1).tolist()
        texts = [(*text, token) for text, token in zip(texts, nexts, strict=True)]
    for prompt, text in zip(prompts, texts, strict=True):
        begin = "".join(letters.get(token, "") for token in text[-3:])
        if len(set(begin)) == 3:
            return prompt, begin
    raise AssertionError("no such prompt")


def _printable(model: Model) -> dict[int, str]:
    """The tokens that are one printable ASCII letter."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(256)}
    return {token: text for token, text in texts.items() if len(text) == 1 and text.isascii() and text.isprintable()}

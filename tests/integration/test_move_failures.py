"""Prompts move between real workers while a worker, a load or the scheduler fails, with a real gateway and bills."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.move_cluster import Answer, MoveCluster, Prompt, instance_of, paused, running_cluster
from tests.integration.test_move_histories import SHARED, prompts_of
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, prompt_of
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kv.export import PrefillExport
from torchrelay.prefill import prompt_moves
from torchrelay.prefill.prompt_moves import PromptReceiver
from torchrelay.worker.slot.slot import FREE

MakeCluster = Callable[..., Awaitable[MoveCluster]]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
async def cluster_of(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeCluster]:
    monkeypatch.setattr(prompt_moves, "_KEPT_S", HANG_S)
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> MoveCluster:
            return await stack.enter_async_context(running_cluster(tmp_path, model, nats_url, monkeypatch, **settings))

        yield make


@pytest.fixture
def prompt(model: Model) -> Prompt:
    return Prompt("greedy", prompt_of(70), GREEDY).with_reference(model)


async def begun(cluster: MoveCluster, prompt: Prompt, **options: Any) -> Answer:
    """Sends a prompt to the loading worker, which computes two layers of it."""
    cluster.let_layers(2)
    answer = cluster.send(prompt, **options)
    await eventually(lambda: cluster.boundaries == [2], "the prompt at its boundary")
    return answer


async def recalled(cluster: MoveCluster, prompt: Prompt) -> Answer:
    """Sends a prompt to the loading worker, and recalls it after two layers."""
    answer = await begun(cluster, prompt)
    await cluster.scheduler.recall_prompt(answer.request_id)
    return answer


async def assert_ends_well(cluster: MoveCluster, answer: Answer, num_imports: int | None = None) -> None:
    """The answer is complete, and is billed once; after the load no worker holds anything. ``num_imports``: None where
    it depends on which of two ends first.
    """
    await cluster.assert_complete(answer)
    assert num_imports in (None, len(answer.imports))
    cluster.gate.open_segments(cluster.num_segments)
    if cluster.source.worker.slot.state != FREE:
        await cluster.source.until_ready()
    await cluster.assert_nothing_is_held()


class HeldCalls:
    """Holds the calls of a coroutine method until the test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.has_begun, self.may_go_on = asyncio.Event(), asyncio.Event()
        original = getattr(owner, name)

        async def held(*args: Any) -> Any:
            self.has_begun.set()
            await self.may_go_on.wait()
            return await original(*args)

        monkeypatch.setattr(owner, name, held)


async def held_import(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, step: str
) -> tuple[MoveCluster, Answer, HeldCalls]:
    """A recalled prompt whose next worker waits before a step of its import."""
    held = HeldCalls(monkeypatch, PromptReceiver, step)
    cluster = await cluster_of()
    answer = await recalled(cluster, prompt)
    await held.has_begun.wait()
    return cluster, answer, held


class HeldExport:
    """Holds the source's engine in the middle of an export."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self._may_go_on = asyncio.Event(), threading.Event()
        loop, read_piece = asyncio.get_running_loop(), prompt_moves._read_piece

        def read(exported: PrefillExport, piece: range) -> bytes:
            if piece.start:
                loop.call_soon_threadsafe(self.has_begun.set)
                self._may_go_on.wait(HANG_S)
            return read_piece(exported, piece)

        monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
        monkeypatch.setattr(prompt_moves, "_read_piece", read)

    @contextmanager
    def during(self) -> Iterator[None]:
        """The export goes on after the block."""
        try:
            yield
        finally:
            self._may_go_on.set()


async def test_next_worker_is_lost_after_the_import(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, answer, held = await held_import(cluster_of, prompt, monkeypatch, "start")
    await cluster.reload(cluster.next)
    held.may_go_on.set()
    await assert_ends_well(cluster, answer, num_imports=0)
    assert cluster.scheduler.placed[answer.request_id][0].attempt == 3


@pytest.mark.parametrize("is_apart", [False, True])
async def test_next_worker_is_lost_with_the_first_token(
    cluster_of: MakeCluster, prompt: Prompt, is_apart: bool
) -> None:
    """Its stream to the gateway breaks before the token; the token is billed once."""
    cluster = await cluster_of()
    if not is_apart:
        cluster.scheduler.decode_of = lambda prefill: prefill
    lost: list[int] = []

    def arrives(output: pb.ChoiceOutput) -> bool:
        if output.key.attempt == 2 and output.token_ids and output.first_position == 0 and not lost:
            lost.extend(output.token_ids)
            raise TimeoutError("the stream broke")
        return True

    cluster.on_output = arrives
    await assert_ends_well(cluster, await recalled(cluster, prompt), num_imports=1)
    assert tuple(lost) == prompt.expected[0][:1]


async def test_next_worker_hangs_during_the_import(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source waits no longer than it keeps a prompt, and the answer is complete."""
    monkeypatch.setattr(prompt_moves, "_KEPT_S", 0.2)
    cluster, answer, held = await held_import(cluster_of, prompt, monkeypatch, "receive")
    with paused(cluster.next):
        held.may_go_on.set()
        await eventually(lambda: not cluster.boundaries, "the end of the prompt at the source")
    await assert_ends_well(cluster, answer)


async def test_load_fails_while_the_source_computes(cluster_of: MakeCluster, prompt: Prompt) -> None:
    cluster = await cluster_of()
    answer = await begun(cluster, prompt)
    cluster.gate.fail("the holder was lost")
    await assert_ends_well(cluster, answer, num_imports=0)


async def test_load_fails_during_the_export(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = HeldExport(monkeypatch)
    cluster = await cluster_of()
    with export.during():
        answer = await recalled(cluster, prompt)
        await export.has_begun.wait()
        cluster.gate.fail("the holder was lost")
    await eventually(lambda: cluster.source.worker.slot.state == FREE, "the end of the load")
    await assert_ends_well(cluster, answer)


async def test_load_fails_after_the_import(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, answer, held = await held_import(cluster_of, prompt, monkeypatch, "start")
    cluster.gate.fail("the holder was lost")
    await eventually(lambda: cluster.source.worker.slot.state == FREE, "the end of the load")
    held.may_go_on.set()
    await assert_ends_well(cluster, answer, num_imports=1)


@pytest.mark.parametrize("phase", ["receive", "start"])
async def test_decode_worker_is_lost_during_a_move(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    cluster, answer, held = await held_import(cluster_of, prompt, monkeypatch, phase)
    await cluster.reload(cluster.decode)
    held.may_go_on.set()
    await assert_ends_well(cluster, answer)


async def test_decode_worker_has_no_pages_for_a_moved_prompt(cluster_of: MakeCluster, prompt: Prompt) -> None:
    """The prompt is tried again, until the decode worker has pages."""
    cluster = await cluster_of(kv_timeout_s=0.5)
    decode = cluster.decode.worker
    allocator = instance_of(cluster.decode)._tables.allocator
    pages = await decode.engine.call(lambda: allocator.take(allocator.num_free))
    answer = await recalled(cluster, prompt)
    await eventually(lambda: cluster.scheduler.placed[answer.request_id][0].attempt > 2, "another attempt")
    await decode.engine.call(lambda: allocator.release(pages))
    decode.engine.wake()
    decode.pages_freed()
    await assert_ends_well(cluster, answer)


async def test_recall_of_an_attempt_that_has_moved_is_ignored(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new scheduler may recall what the scheduler before it has recalled."""
    held = HeldCalls(monkeypatch, PromptReceiver, "start")
    cluster = await cluster_of()
    answer = await begun(cluster, prompt)
    first, _ = cluster.scheduler.placed[answer.request_id]
    await cluster.scheduler.recall_prompt(answer.request_id)
    await held.has_begun.wait()
    await cluster.scheduler.recall(first, True)
    held.may_go_on.set()
    await assert_ends_well(cluster, answer, num_imports=1)
    assert cluster.scheduler.placed[answer.request_id][0].attempt == 2


async def test_prompt_is_recalled_again_during_its_import(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back to the source, which computes it from its beginning."""
    cluster, answer, held = await held_import(cluster_of, prompt, monkeypatch, "receive")
    await cluster.scheduler.recall_prompt(answer.request_id)
    await eventually(lambda: cluster.scheduler.placed[answer.request_id][0].attempt == 3, "the next attempt")
    cluster.gate.open_segments(cluster.num_segments)
    held.may_go_on.set()
    await assert_ends_well(cluster, answer, num_imports=0)


async def test_last_segment_arrives_during_the_export(
    cluster_of: MakeCluster, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = HeldExport(monkeypatch)
    cluster = await cluster_of()
    with export.during():
        answer = await recalled(cluster, prompt)
        await export.has_begun.wait()
        cluster.gate.open_segments(cluster.num_segments)
        await cluster.source.until_ready()
    await assert_ends_well(cluster, answer, num_imports=1)


async def test_next_worker_decodes_what_it_imports(cluster_of: MakeCluster, model: Model) -> None:
    """Prompts of all kinds: choices, stops, penalties, log probabilities."""
    cluster = await cluster_of()
    cluster.scheduler.decode_of = lambda prefill: cluster.next
    for each in prompts_of(model):
        await cluster.start_source()
        await assert_ends_well(cluster, await recalled(cluster, each), num_imports=1)


async def test_prompt_moves_to_a_worker_that_has_its_prefix(cluster_of: MakeCluster, model: Model) -> None:
    """The pages that it has in its cache are billed as cached, as of any prompt."""
    cluster = await cluster_of()
    first = Prompt("first", (*SHARED, *prompt_of(9, 4)), GREEDY).with_reference(model)
    second = Prompt("second", (*SHARED, *prompt_of(20, 5)), GREEDY).with_reference(model)
    cluster.scheduler.begins_at_next = lambda: True
    await cluster.assert_complete(cluster.send(first))
    cluster.scheduler.begins_at_next = lambda: False
    answer = await recalled(cluster, second)
    [usage] = await cluster.assert_complete(answer)
    assert usage.num_cached_prompt_tokens == len(SHARED)
    await assert_ends_well(cluster, answer, num_imports=1)

"""The messages of a prompt's export: what the exporter keeps and gives up, and what the importer refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.wait import eventually
from tests.unit.engine.harness import Model, group_of, half_loaded, outputs, prompt_of, run
from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest, Unavailable
from torchrelay.control.v1 import prefill_pb2
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.layout import context_digests
from torchrelay.prefill import prompt_moves
from torchrelay.prefill.prompt_moves import PromptReceiver, RecalledPrompts

PROMPT = prompt_of(70)
PACK_ID = "pack-1"
DIGESTS = context_digests(group_of(PROMPT))


def exported_prompt(**changes: Any) -> prefill_pb2.ExportPart:
    fields: dict[str, Any] = {"boundary": 1, "block_tokens": 16, "pack_id": PACK_ID, "context_digests": DIGESTS}
    return prefill_pb2.ExportPart(prompt=prefill_pb2.ExportedPrompt(**{**fields, **changes}))


class InlineEngine:
    """Runs commands at once."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance

    def require_relay_instance(self) -> Any:
        return self.instance

    def call(self, command: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(command())
        except Exception as error:
            future.set_exception(error)
        return future

    call_between_layers = call


async def receiver_of(model: Model) -> tuple[PromptReceiver, InlineEngine]:
    engine = InlineEngine(model.instance())
    receiver = PromptReceiver(engine, group_of(PROMPT), PACK_ID, None)  # type: ignore[arg-type]
    await receiver.reserve()
    return receiver, engine


async def stream_of(parts: Sequence[prefill_pb2.ExportPart]) -> AsyncIterator[prefill_pb2.ExportPart]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "must begin with its prompt"),
        ([prefill_pb2.ExportPart(data=b"x")], "must begin with its prompt"),
        ([exported_prompt(block_tokens=0)], "must name its block_tokens"),
        ([exported_prompt(boundary=9)], "layer boundary 9"),
        ([exported_prompt(pack_id="pack-2")], "of other tokens, or of another pack"),
        ([exported_prompt(context_digests=context_digests(group_of(PROMPT[::-1])))], "of other tokens"),
        ([exported_prompt(context_digests=[])], "of other tokens"),
        ([exported_prompt(), prefill_pb2.ExportPart(data=b"x")], "ends before chunk"),
        ([exported_prompt(), prefill_pb2.ExportPart(data=bytes(1 << 20))], "does not end after"),
    ],
)
async def test_malformed_export_is_computed_from_its_beginning(
    model: Model, parts: Sequence[prefill_pb2.ExportPart], why: str
) -> None:
    receiver, engine = await receiver_of(model)
    with pytest.raises((DataCorrupted, InvalidRequest), match=why):
        await receiver.receive(stream_of(parts))
    await receiver.start_over()
    assert outputs(run(engine.instance))["r/0", 0] == model.expected(PROMPT)


async def test_import_does_nothing_once_its_instance_is_gone(model: Model) -> None:
    receiver, engine = await receiver_of(model)
    engine.instance = object()
    with pytest.raises(Conflict, match="was unloaded"):
        await receiver.receive(stream_of([exported_prompt()]))
    with pytest.raises(Conflict, match="was unloaded"):
        await receiver.start_over()


def kept_prompt(model: Model) -> tuple[Instance, RecalledPrompts]:
    instance = half_loaded(model, 2)
    recalled = RecalledPrompts(SimpleNamespace(engine=InlineEngine(instance), cancel=instance.cancel))
    instance.prefill(group_of(PROMPT))
    run(instance)
    recalled.keep("r/0")
    return instance, recalled


async def test_export_ends_with_its_instance(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may be another model's by then."""
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    instance, recalled = kept_prompt(model)
    parts = recalled.export("r/0", PACK_ID)
    assert (await anext(parts)).prompt.boundary == 2 and (await anext(parts)).data
    recalled._worker.engine.instance = half_loaded(model, 2)
    with pytest.raises(Conflict, match="was unloaded"):
        await anext(parts)
    assert "r/0" not in recalled and instance.groups() == ()


async def test_export_is_given_up_when_the_importer_hangs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, recalled = kept_prompt(model)
    parts = recalled.export("r/0", PACK_ID)
    monkeypatch.setattr(prompt_moves, "_KEPT_S", 0.05)
    assert (await anext(parts)).prompt.boundary == 2
    with pytest.raises(Conflict, match="nothing is kept"):
        await anext(recalled.export("r/0", PACK_ID))
    assert "r/0" in recalled
    await eventually(lambda: not instance.groups(), "the end of the prompt")
    with pytest.raises(Conflict, match="has ended"):
        await anext(parts)


async def test_export_goes_on_as_long_as_the_importer_takes_messages(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    _, recalled = kept_prompt(model)
    ends_s = []
    async for _ in recalled.export("r/0", PACK_ID):
        ends_s.append(recalled._timers["r/0"].when())
    assert len(ends_s) > 3 and all(earlier < later for earlier, later in pairwise(ends_s))


async def test_silent_export_is_computed_from_its_beginning(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_moves, "_MESSAGE_S", 0.05)
    receiver, engine = await receiver_of(model)
    is_closed = asyncio.Event()

    async def silent() -> AsyncIterator[prefill_pb2.ExportPart]:
        yield exported_prompt()
        try:
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    with pytest.raises(Unavailable, match="was silent"):
        await receiver.receive(silent())
    assert is_closed.is_set()
    await receiver.start_over()
    assert outputs(run(engine.instance))["r/0", 0] == model.expected(PROMPT)


async def test_importer_holds_at_most_two_pieces(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no more messages while the engine has not copied the piece before the last."""
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    receiver, engine = await receiver_of(model)
    layout = engine.instance._prefill_layout(group_of(PROMPT), 1, 16)
    queued: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
    run_at_once = engine.call

    def call(command: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        queued.append((command, future))
        return future

    num_taken = 0

    async def parts() -> AsyncIterator[prefill_pb2.ExportPart]:
        nonlocal num_taken
        engine.call_between_layers = call  # type: ignore[method-assign]
        yield exported_prompt()
        for piece in layout.pieces(1 << 10):
            num_taken += 1
            yield prefill_pb2.ExportPart(data=bytes(sum(map(layout.chunk_bytes, piece))))

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    receiving = asyncio.ensure_future(receiver.receive(parts()))
    await settle()
    command, future = queued.pop()  # the preparation for the chunks
    future.set_result(await run_at_once(command))
    num_pieces = len(list(layout.pieces(1 << 10)))
    for number in range(num_pieces):
        await settle()
        assert len(queued) == 1 and num_taken <= number + 2
        command, future = queued.pop()
        future.set_result(await run_at_once(command))
    assert num_pieces > 2 and await receiving == 1

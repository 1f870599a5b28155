"""Tasks that run alongside a block or end together."""

from __future__ import annotations

import asyncio

import pytest

from torchrelay.gateway.background import all_ended


async def test_all_ended_waits_for_the_rest_after_a_failure() -> None:
    ended: list[str] = []

    async def fail(name: str) -> None:
        raise ValueError(name)

    async def end_later() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append("later")

    with pytest.raises(ExceptionGroup) as caught:
        await all_ended(fail("first"), end_later(), fail("last"))
    assert ended == ["later"]
    assert [str(error) for error in caught.value.exceptions] == ["first", "last"]


async def test_all_ended_raises_nothing_on_success() -> None:
    ended: list[str] = []

    async def end(name: str) -> None:
        await asyncio.sleep(0)
        ended.append(name)

    await all_ended(end("first"), end("last"))
    assert ended == ["first", "last"]

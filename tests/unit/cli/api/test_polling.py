from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.polling import look, looks
from torchrelay.cli.errors import ApiError, Unreachable


class Refusing(GatewayClient):
    """A client whose gateway cannot answer."""

    def __init__(self, message: str, status: int) -> None:
        self._refusal = ApiError(message, status=status)

    def content(self, *_args: Any, **_options: Any) -> bytes:
        raise self._refusal


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("the history cannot be read: NATS does not respond; retry once it runs", "is nats-server running?"),
        ("the scheduler does not answer", "is the platform up? torchrelay up"),
    ],
)
def test_part_of_the_platform_that_is_down_is_named(message: str, hint: str) -> None:
    with pytest.raises(Unreachable) as refused:
        look(Refusing(message, 503), "/v1/events")
    assert (refused.value.message, refused.value.hint) == (message, hint)
    with pytest.raises(ApiError):
        look(Refusing("the key has no permission", 403), "/v1/events")


def test_full_pages_follow_at_once_and_outages_between_them_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    answers: Iterator[int | Exception] = iter([2, 2, Unreachable("gone"), Unreachable("gone"), 2, 1, 0])

    def ask() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lost: list[int] = []
    asked = looks(ask, lambda: True, lambda: lost.append(len(waits)), every_s=7.0, is_behind=lambda answer: answer == 2)
    assert [next(asked) for _ in range(5)] == [2, 2, 2, 1, 0]
    assert lost == [0] and waits.count(7.0) <= 2

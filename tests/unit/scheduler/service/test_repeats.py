"""Which reports are repeats of one that was checked."""

from __future__ import annotations

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchrelay.common.net.load_reports import MAC_HEADER
from torchrelay.scheduler.service.repeats import WHOLE_EVERY, Repeats


def message(data: bytes = b"report", mac: str = "aa", subject: str = "relay.load.worker.w1") -> Msg:
    return Msg(Client(), subject=subject, data=data, headers={MAC_HEADER: mac})


def test_second_repeat_counts_and_every_fortieth_does_not() -> None:
    repeats, verdicts = Repeats(), []
    assert not repeats.is_repeat(message())
    repeats.note(message())
    for _ in range(2 * WHOLE_EVERY):
        verdicts.append(repeats.is_repeat(message()))
        if not verdicts[-1]:
            repeats.note(message())
    assert not verdicts[0] and all(verdicts[1 : WHOLE_EVERY - 1])
    assert verdicts.count(False) == 3


@pytest.mark.parametrize(
    "other", [message(data=b"rep0rt"), message(mac="ab"), message(subject="relay.load.worker.w2"), message(mac="")]
)
def test_different_message_is_no_repeat(other: Msg) -> None:
    repeats = Repeats()
    repeats.note(message())
    repeats.is_repeat(message())
    assert not any(repeats.is_repeat(other) for _ in range(3))


def test_unchecked_message_is_no_repeat() -> None:
    repeats = Repeats()
    assert not any(repeats.is_repeat(message(mac="forged")) for _ in range(5))

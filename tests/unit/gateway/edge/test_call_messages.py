"""A call learns of each message when its first byte has arrived, however the bytes are divided."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.edge.call_messages import CallMessages


@given(lengths=st.lists(st.integers(0, 20), max_size=8), size=st.integers(1, 30))
def test_message_begins_with_its_first_byte(lengths: list[int], size: int) -> None:
    sent = b"".join(struct.pack(">BI", 0, length) + bytes(length) for length in lengths)
    begins = [sum(5 + length for length in lengths[:index]) for index in range(len(lengths))]
    messages, num_read, num_begun = CallMessages(), 0, 0
    for offset in range(0, len(sent), size):
        part = sent[offset : offset + size]
        num_begun += messages.receive(part)
        assert num_begun == sum(begin < offset + len(part) for begin in begins)
        while num_read < num_begun:
            assert messages.has_begun
            messages.note_read()
            num_read += 1
        assert not messages.has_begun
    messages.end()
    assert messages.has_begun


def test_call_is_told_of_the_first_byte_and_of_the_end() -> None:
    for wake in (lambda messages: messages.receive(b"\0"), CallMessages.end):
        messages, told = CallMessages(), list[str]()
        messages.on_begun = lambda told=told: told.append("begun")
        messages.receive(b"")
        assert not told
        wake(messages)
        assert told == ["begun"]

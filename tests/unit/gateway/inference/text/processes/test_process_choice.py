from __future__ import annotations

from torchrelay.gateway.inference.text.processes.frames import FileId
from torchrelay.gateway.inference.text.processes.process_choice import ProcessState, choose
from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru

A, B, C = (("tokenizer.json", letter) for letter in "abc")


def process(*files: FileId, is_busy: bool = False, is_slow: bool = False) -> ProcessState:
    held: TenantLru[FileId] = TenantLru(100)
    for file in files:
        held.add(file, "acme", 10)
    return ProcessState(held, 0.0, is_busy, is_slow)


def test_process_with_the_tokenizer_is_chosen_first() -> None:
    states = [process(), process(A), process(B)]
    assert choose(states, A) is states[1]
    assert choose(states, C) is states[0], "it has least"


def test_busy_holder_is_waited_for_until_it_is_slow() -> None:
    assert choose([process(B), process(A, is_busy=True)], A) is None
    states = [process(B), process(A, is_busy=True, is_slow=True)]
    assert choose(states, A) is states[0]
    states = [*states, process(A, is_busy=True)]
    assert choose(states, A) is None
    assert choose(states[1:], A) is None, "none is free"
    assert choose([], A) is None

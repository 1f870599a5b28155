from __future__ import annotations

from collections import OrderedDict

from torchrelay.gateway.inference.text.process_choice import ProcessState, choose

A, B, C = (("tokenizer.json", letter) for letter in "abc")


def process(*files: tuple[str, str], is_busy: bool = False, is_slow: bool = False) -> ProcessState:
    return ProcessState(0.0, is_busy, is_slow, OrderedDict.fromkeys(files, 10))


def test_a_process_that_has_the_tokenizer_comes_first() -> None:
    states = [process(), process(A), process(B)]
    assert choose(states, A) is states[1]
    assert choose(states, C) is states[0], "it has least to forget"


def test_a_process_that_is_free_in_a_moment_is_waited_for_but_not_for_long() -> None:
    assert choose([process(B), process(A, is_busy=True)], A) is None
    states = [process(B), process(A, is_busy=True, is_slow=True)]
    assert choose(states, A) is states[0]
    states = [*states, process(A, is_busy=True)]
    assert choose(states, A) is None
    assert choose(states[1:], A) is None, "none is free"
    assert choose([], A) is None


def test_the_least_recently_used_files_go_until_the_needed_fit() -> None:
    state = process(A, B, C)
    assert state.to_forget(10, {C}, max_bytes=40) == ()
    assert state.to_forget(10, {C}, max_bytes=30) == (A,)
    assert state.to_forget(10, {A, C}, max_bytes=30) == (B,)
    assert state.to_forget(1000, {A}, max_bytes=30) == (B, C), "one larger than all is held alone"

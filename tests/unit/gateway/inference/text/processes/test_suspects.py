from __future__ import annotations

from torchrelay.gateway.inference.text.processes.suspects import Suspects


def test_only_the_pair_is_confined_for_its_time() -> None:
    suspects = Suspects()
    assert not suspects.is_suspect("acme", "loop", 0)
    suspects.note("acme", "loop", 0)
    assert suspects.is_suspect("acme", "loop", 59)
    assert not suspects.is_suspect("acme", "fine", 59)
    assert not suspects.is_suspect("beta", "loop", 59), "the same model, called by others"
    assert not suspects.is_suspect("acme", "loop", 60)


def test_kill_restarts_the_confinement() -> None:
    suspects = Suspects()
    suspects.note("acme", "loop", 0)
    suspects.note("acme", "loop", 50)
    assert suspects.is_suspect("acme", "loop", 109) and not suspects.is_suspect("acme", "loop", 110)


def test_tenant_with_several_suspects_is_confined_wholly() -> None:
    suspects = Suspects()
    for number in range(100):
        suspects.note("acme", f"loop-{number}", number / 10)
    assert suspects.is_suspect("acme", "fine", 10) and not suspects.is_suspect("beta", "fine", 10)
    assert not suspects.is_suspect("acme", "fine", 60), "the first of the three is over"

"""What an option refuses, as people read it."""

from __future__ import annotations

from tests.unit.cli.conftest import Run


def test_a_value_that_an_option_cannot_take_is_told_in_plain_words(run: Run) -> None:
    for arguments, sentence in (
        (("chat", "m", "hi", "--max-tokens", "ten"), "'--max-tokens': must be a whole number, not 'ten'"),
        (("models", "set", "m", "--max-instances", "-3"), "'--max-instances': must be at least 0, not -3"),
        (("events", "--kind", "moon"), "'--kind': 'moon' is not one of 'relay', 'instance', 'scale', 'model'"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.replace("│", "").split())

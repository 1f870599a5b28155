"""What an option refuses, as people read it."""

from __future__ import annotations

from tests.unit.cli.conftest import Run


def test_a_value_that_an_option_cannot_take_is_told_in_plain_words(run: Run) -> None:
    for arguments, sentence in (
        (("chat", "m", "hi", "--max-tokens", "ten"), "'--max-tokens': must be an integer, not 'ten'"),
        (("models", "set", "m", "--max-instances", "-3"), "'--max-instances': must be at least 0, not -3"),
        (("events", "--kind", "moon"), "'--kind': 'moon' is not one of 'relay', 'instance', 'scale', 'copy', 'model'"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.replace("│", "").split())


def test_an_argument_left_out_is_told_with_what_it_is(run: Run) -> None:
    for arguments, sentence in (
        (
            ("explain",),
            "Missing argument 'REQUEST_ID'. The request id below an answer of `chat` (REST: x-request-id)",
        ),
        (("models", "set"), "Missing argument 'NAME'. TENANT/MODEL"),
        (("tenant", "set"), "Missing argument 'NAME'."),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.replace("│", "").split())

"""Messages about refused options."""

from __future__ import annotations

from tests.unit.cli.conftest import Run

TARGET = "a target is from 0.001 s to 86,400 s, or 0 for the scheduler's default;"


def test_invalid_option_value_has_plain_message(run: Run) -> None:
    for arguments, sentence in (
        (("chat", "m", "hi", "--max-tokens", "ten"), "'--max-tokens': must be an integer, not 'ten'"),
        (("models", "set", "m", "--max-instances", "-3"), "'--max-instances': must be at least 0, not -3"),
        (("models", "set", "m", "--standard-ttft-s", "-1"), f"'--standard-ttft-s': {TARGET} not -1 s"),
        (("models", "set", "m", "--tbt-target-s", "1e-9"), f"'--tbt-target-s': {TARGET} not 1e-09 s"),
        (("models", "set", "m", "--tbt-target-s", "1e300"), f"'--tbt-target-s': {TARGET} not 1e+300 s"),
        (("models", "set", "m", "--tbt-target-s", "inf"), f"'--tbt-target-s': {TARGET} not inf s"),
        (("models", "set", "m", "--idle-timeout-s", "inf"), "'--idle-timeout-s': must be at most 2592000.0, not inf"),
        (("events", "--kind", "moon"), "'--kind': 'moon' is not one of 'relay', 'instance', 'scale', 'copy', 'model'"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.replace("│", "").split())


def test_missing_argument_is_described(run: Run) -> None:
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

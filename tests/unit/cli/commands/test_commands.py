"""The command line as a person uses it, against a gateway and a scheduler that answer, know nothing, or go away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import termios
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Run, refusal
from tests.unit.cli.fake_gateway import ADMIN_KEY, TENANT_KEY, FakeGateway
from torchrelay.cli import main as program
from torchrelay.cli.api.access import Access
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.commands import chat as chat_module
from torchrelay.cli.commands import events, top
from torchrelay.cli.errors import ApiError, Unreachable, api_error
from torchrelay.cli.home import Home
from torchrelay.cli.views.cluster import LiveScreen

COMMANDS = ["up", "upload", "uploads", "models", "chat", "prices", "usage", "bill", "top", "explain"]
TARGET = "a target is from 0.001 s to 86,400 s, or 0 for the scheduler's default;"
PROGRAM = (sys.executable, "-c", "from torchrelay.cli.main import main; main()")
NESTED = ["key create", "key list", "key use", "key revoke", "tenant create", "tenant list", "tenant set"]
NESTED += ["models set", "models alias", "models delete", "uploads abort"]
NESTED += ["models show", "models settings", "models versions", "models rollback", "prices set"]


def test_every_command_has_example(run: Run) -> None:
    for command in (*COMMANDS, *NESTED):
        shown = run(*command.split(), "--help")
        assert shown.exit_code == 0
        assert f"torchrelay {command}" in shown.stdout.split("Example:")[1]


def test_help_lists_commands_and_first_steps(run: Run) -> None:
    version = run("--version")
    assert (version.exit_code, version.stdout) == (0, f"torchrelay {metadata.version('torchrelay')}\n")
    shown = run("--help").stdout
    assert all(f" {command} " in shown for command in COMMANDS)
    assert "torchrelay key create --tenant acme" in shown


def test_wrong_usage_is_status_2(run: Run) -> None:
    for wrong in (("nonsense",), ("chat",), ("upload", ".", "--max-instances", "-1")):
        assert run(*wrong).exit_code == 2


def test_invalid_option_or_missing_argument_has_plain_message(run: Run) -> None:
    for arguments, sentence in (
        (("chat", "m", "hi", "--max-tokens", "ten"), "'--max-tokens': must be an integer, not 'ten'"),
        (("models", "set", "m", "--max-instances", "-3"), "'--max-instances': must be at least 0, not -3"),
        (("models", "set", "m", "--standard-ttft-s", "-1"), f"'--standard-ttft-s': {TARGET} not -1 s"),
        (("models", "set", "m", "--tbt-target-s", "1e-9"), f"'--tbt-target-s': {TARGET} not 1e-09 s"),
        (("models", "set", "m", "--tbt-target-s", "1e300"), f"'--tbt-target-s': {TARGET} not 1e+300 s"),
        (("models", "set", "m", "--tbt-target-s", "inf"), f"'--tbt-target-s': {TARGET} not inf s"),
        (("models", "set", "m", "--idle-timeout-s", "inf"), "'--idle-timeout-s': must be at most 2592000.0, not inf"),
        (
            ("events", "--kind", "moon"),
            "'--kind': 'moon' is not one of 'relay', 'instance', 'scale', 'copy', 'store', 'model'",
        ),
        (("explain",), "Missing argument 'REQUEST_ID'. The request id below an answer of `chat` (REST: x-request-id)"),
        (("models", "set"), "Missing argument 'NAME'. TENANT/MODEL"),
        (("tenant", "set"), "Missing argument 'NAME'."),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.replace("│", "").split())


def test_error_prints_sentence_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["torchrelay", "models", "--home", str(tmp_path / "[bold]none")])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "torchrelay: no platform is running at" in said
    assert "[bold]none" in said  # what others wrote is no markup
    assert "torchrelay up" in said
    assert "Traceback" not in said


def test_refusals_come_before_calls(run: Run, home: Home, gateway: FakeGateway) -> None:
    """The home's keys are not sent to another gateway; its own is known by its address."""
    assert run("tenant", "create", "acme").exit_code == 0
    for arguments, message, hint in (
        (("tenant", "create", "acme"), "already", "create a key for it: torchrelay key create --tenant acme"),
        (("models", "--url", "http://127.0.0.1:1"), "no API key", ""),
        (("models", "--url", "localhost:8080"), "--url: 'localhost:8080' is not a valid address", ""),
    ):
        refused = refusal(run(*arguments))
        assert message in refused.message and hint in (refused.hint or "")
    assert run("models", "--url", gateway.url + "/v1/").exit_code == 0


def test_tenant_limits_are_set(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("tenant", "set", "acme", "--budget", "12.5", "--storage-quota-gb", "none")
    assert gateway.asked[-1] == (
        "PATCH",
        "/v1/tenants/acme",
        {"storage_quota_bytes": None, "budget_nano": 12_500_000_000},
    )
    assert "acme: storage quota no limit, $12.50, service class any" in shown.stdout
    refusal(run("tenant", "set", "acme"))
    shown = run("tenant", "set", "acme", "--tokens-per-minute", "9000", "--budget", "3", "--budget-period", "week")
    wanted = {"tokens_per_minute": 9000, "budget_nano": 3 * 10**9, "budget_period": "week"}
    assert gateway.asked[-1] == ("PATCH", "/v1/tenants/acme", wanted)
    assert "9,000 tokens/min, $3.00/week" in shown.stdout
    for service_class, sent in (("batch", "batch"), ("none", None)):
        shown = run("tenant", "set", "acme", "--service-class", service_class)
        assert gateway.asked[-1] == ("PATCH", "/v1/tenants/acme", {"service_class": sent})
        assert f"service class {sent or 'any'}" in shown.stdout
    for wrong in ("-1", "nan", "inf", "much"):
        assert run("tenant", "set", "acme", f"--budget={wrong}").exit_code == 2
        assert run("tenant", "create", "acme", f"--budget={wrong}").exit_code == 2
    refused = run("tenant", "create", "acme", "--storage-quota-gb", "lots")
    assert "--storage-quota-gb" in refused.stderr and "'lots' must be a non-negative number" in refused.stderr


def test_errors_name_options_instead_of_api_fields() -> None:
    def said(message: str, param: str) -> str:
        return api_error(json.dumps({"error": {"message": message, "param": param}}).encode(), 400).message

    for message, param, expected in (
        ("'x' is no time", "from", "--from: 'x' is no time"),
        ("'x' is no month: write it like 2026-11", "period", "--month: 'x' is no month: write it like 2026-11"),
        ("budget_nano must be at least 0, not -1", "budget_nano", "--budget must be at least 0, not -1"),
        ("tbt_target_s: a target is", "tbt_target_s", "--tbt-target-s: a target is"),
        ("cached_nano must be at most prompt_nano (1)", "cached_nano", "--cached must be at most --prompt (1)"),
        ("'x' is no time", "valid_from", "--from: 'x' is no time"),
        ("is not valid JSON", "config.json", "is not valid JSON (config.json)"),
        ("config.json is not valid JSON", "config.json", "config.json is not valid JSON"),
    ):
        assert said(message, param) == expected
    for field in ("upload_id", "key_id", "request_id", "name"):  # of paths and bodies that no option names
        assert said("open upload 'x' not found", field) == "open upload 'x' not found"


def test_an_option_that_the_gateway_refuses_is_status_2() -> None:
    def status(param: str, http_status: int) -> int:
        return api_error(json.dumps({"error": {"message": "no", "param": param}}).encode(), http_status).exit_code

    assert [status("from", 400), status("valid_from", 400), status("engine", 422)] == [2, 2, 2]
    assert [status("engine", 503), status("model", 404), status("config.json", 400)] == [1, 1, 1]


def test_question_streams_to_standard_output(run: Run, home: Home) -> None:
    hint = refusal(run("chat", "tiny", "hi"))
    assert "tenant's key" in hint.message
    home.save_key(TENANT_KEY)
    shown = run("chat", "tiny", "hi", "--system", "be short")
    assert shown.stdout == "Hello\u2028there\n"
    assert "first token after" in shown.stderr
    assert "req-1" in shown.stderr


def test_piped_question_is_answered(
    run: Run, home: Home, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRELAY_API_KEY", TENANT_KEY)
    assert run("chat", "tiny", said="what is\na pack?\n").exit_code == 0
    assert gateway.asked[-1][2]["messages"] == [{"role": "user", "content": "what is\na pack?"}]
    for said in ("", b"\xff\xfe\x00"):
        refusal(run("chat", "tiny", said=said))
    num_asked = len(gateway.asked)
    for empty in ("", " \n"):
        assert refusal(run("chat", "tiny", empty)).message == "the question is empty"
    for command in (
        ("chat", ""),
        ("chat", " ", "hi"),
        ("models", "delete", "", "--yes"),
        ("models", "show", ""),
        ("explain", ""),
    ):
        assert run(*command).exit_code == 2
    refusal(run("chat", "tiny", "\udcff"))  # an argument that is no UTF-8
    assert len(gateway.asked) == num_asked


def test_ctrl_c_stops_answer_and_keeps_its_text(
    home: Home, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.hang_after_pieces = True
    written: list[str] = []

    def interrupted(text: str) -> None:
        written.append(text)
        if len(written) == len(gateway.pieces):
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "write", interrupted)
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        talk = chat_module.Conversation(client, "tiny", None, {})
        assert not talk.ask("hi")
        assert "stopped" in capsys.readouterr().err
        gateway.hang_after_pieces = False
        written.clear()
        monkeypatch.setattr(chat_module, "write", written.append)
        assert talk.ask("go on")
    said = [message["content"] for message in gateway.asked[-1][2]["messages"]]
    assert said == ["hi", "".join(gateway.pieces), "go on"]


def test_ctrl_c_ends_single_question_with_one_message(run: Run, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("TORCHRELAY_API_KEY", TENANT_KEY)
    monkeypatch.setattr(chat_module, "write", interrupted)
    shown = run("chat", "tiny", "hi")
    assert shown.exit_code == 130
    assert shown.stderr.count("stopped") == 1


def test_ctrl_c_during_imports_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([*PROGRAM, "up"], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("arguments", [("chat", "tiny", "hi"), ("--help",)])
def test_full_disk_ends_with_message(home: Home, arguments: tuple[str, ...]) -> None:
    home.save_key(TENANT_KEY)
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


def test_closed_pipe_is_not_an_error(home: Home) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        ended = subprocess.run([*PROGRAM, "models"], stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_home_and_url_may_stand_before_the_command(
    run: Run, home: Home, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHRELAY_HOME", str(tmp_path / "absent"))
    monkeypatch.setenv("TORCHRELAY_API_URL", "http://127.0.0.1:1")
    assert run("--home", str(home.path), "--url", gateway.url, "models").exit_code == 0
    other = refusal(run("--home", str(home.path), "models", "--url", "http://127.0.0.1:1", "--key", TENANT_KEY))
    assert "does not answer" in other.message


def test_typed_text_does_not_mix_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    outside, inside = os.openpty()
    with open(inside) as keyboard, open(outside, "wb", buffering=0) as fingers:
        monkeypatch.setattr("sys.stdin", keyboard)
        with chat_module.quiet_keyboard():
            assert not termios.tcgetattr(inside)[3] & termios.ECHO
            fingers.write(b"next question\n")
        assert termios.tcgetattr(inside)[3] & termios.ECHO
        assert keyboard.readline() == "next question\n"


def an_event(sequence: int, kind: str = "relay.started") -> dict[str, Any]:
    return {"sequence": sequence, "at_unix_us": 1, "kind": kind, "model": "acme/tiny", "reason": "a -> b"}


def test_events_pass_on_their_options(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.events = [an_event(1), an_event(2, "instance.ready")]
    shown = run("events", "--kind", "relay", "--kind", "scale", "--since", "2h")
    assert shown.exit_code == 0 and "relay.started      acme/tiny     a -> b" in shown.stdout
    assert "instance.ready" not in shown.stdout
    as_json = run("events", "--json", "--kind", "instance")
    assert "kind=instance" in gateway.asked[-1][1]
    assert [json.loads(line)["text"] for line in as_json.stdout.splitlines()] == ["a -> b"]
    gateway.events = []
    none = run("events", "--kind", "copy", "--since", "2h")
    assert (none.exit_code, none.stdout) == (0, "")
    assert "no events of kind copy in the last 2h" in none.stderr
    wrong = run("events", "--since", "yesterday")
    assert wrong.exit_code == 2 and "is not a duration" in wrong.stderr


def test_all_pages_of_events_are_printed(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.events = [an_event(number) for number in range(1, 2002)]
    shown = run("events", "--json")
    assert [json.loads(line)["sequence"] for line in shown.stdout.splitlines()] == list(range(1, 2002))
    pages = [path for _, path, _ in gateway.asked]
    assert [path.split("after=")[1] for path in pages] == ["0", "1000", "2000"]
    assert len({path.split("&")[0] for path in pages}) == 1  # all since one time


def test_resumed_events_are_not_repeated(gateway: FakeGateway) -> None:
    gateway.events = [an_event(1), an_event(2)]
    with GatewayClient(gateway.url, ADMIN_KEY) as client:
        tail = events.EventHistory(client, [], datetime.now(UTC)).tail(lambda: True, every_s=0.01, timeout_s=0.5)
        assert [next(tail)["sequence"] for _ in range(2)] == [1, 2]
        gateway.events.append(an_event(3))
        assert next(tail)["sequence"] == 3
        gateway.outage = AWAY
        with pytest.raises(Unreachable, match="cannot be reached"):
            next(tail)


AWAY = "the scheduler at 127.0.0.1:1 (TORCHRELAY_SCHEDULER_ADDRESS) cannot be reached"
OF_OPERATORS = pytest.mark.parametrize("command", [("events",), ("events", "--follow"), ("top", "--once")])


@OF_OPERATORS
def test_absent_scheduler_is_stated(run: Run, home: Home, gateway: FakeGateway, command: tuple[str, ...]) -> None:
    gateway.outage = AWAY
    refused = run(*command).exception
    assert isinstance(refused, Unreachable)
    assert (refused.message, refused.hint) == (AWAY, "is the platform up? torchrelay up")


@OF_OPERATORS
def test_absent_gateway_is_stated(run: Run, home: Home, command: tuple[str, ...]) -> None:
    refused = refusal(run(*command, "--url", "http://127.0.0.1:1", "--key", ADMIN_KEY))
    assert "http://127.0.0.1:1 does not answer" in refused.message and "torchrelay up" in refused.hint
    home.endpoints_file.unlink()
    refused = refusal(run(*command))
    assert "no platform is running" in refused.message and "--url" in refused.hint


@OF_OPERATORS
def test_operators_commands_refuse_the_key_of_a_tenant(run: Run, home: Home, command: tuple[str, ...]) -> None:
    refused = refusal(run(*command, "--key", TENANT_KEY))
    assert "requires the admin key" in refused.message and "admin.key" in refused.hint


def test_piped_top_prints_single_view(run: Run, home: Home) -> None:
    shown = run("top")
    assert shown.exit_code == 0 and "every model is at zero" in shown.stdout
    assert json.loads(run("top", "--json").stdout)["epoch"] == "1"


@pytest.mark.parametrize(("is_supervised", "why"), [(False, "has stopped"), (True, "cannot be reached")])
def test_top_ends_with_platform(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, is_supervised: bool, why: str
) -> None:
    monkeypatch.setattr(LiveScreen, "show", lambda *_: setattr(gateway, "outage", AWAY))  # after the first view
    monkeypatch.setattr(Access, "may_return", lambda _: is_supervised)
    with pytest.raises(Unreachable, match=why):
        top.follow(Access(gateway.url, ADMIN_KEY), every_s=0.05, timeout_s=0.2)


def test_request_that_the_scheduler_forgot_is_stated(run: Run, home: Home, gateway: FakeGateway) -> None:
    refused = refusal(run("explain", "req-nope"))
    assert "no recent request has the id 'req-nope'" in refused.message
    assert refused.hint == "the id is printed below an answer of `torchrelay chat`; REST: x-request-id"


def test_model_is_explained_by_its_gateway(run: Run, gateway: FakeGateway) -> None:
    """By a remote gateway, whose platform has its home elsewhere."""
    shown = run("explain", "tiny", "--url", gateway.url, "--key", TENANT_KEY)
    assert gateway.asked[-1][:2] == ("GET", "/v1/explain?model=tiny")
    assert "would load 1 instance" in shown.stdout and "3 late requests" in shown.stdout


def test_unknown_model_has_no_decisions(run: Run, home: Home) -> None:
    for name in ("nothing", "acme/nothing"):
        unknown = run("explain", name).exception
        assert isinstance(unknown, ApiError) and unknown.hint == "see: torchrelay models"

"""The command line as a person uses it, against a gateway that answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import termios
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_gateway import ADMIN_KEY, TENANT_KEY, FakeGateway
from tests.unit.cli.gguf.gguf_files import write_gguf
from torchrelay.cli import main as program
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.commands import chat as chat_module
from torchrelay.cli.commands import models as models_module
from torchrelay.cli.commands.key import id_of
from torchrelay.cli.errors import ApiError, CliError, api_error
from torchrelay.cli.gguf.conversion import Conversion
from torchrelay.cli.home import Home

COMMANDS = ["up", "upload", "uploads", "models", "chat", "prices", "usage", "bill", "top", "explain"]
PROGRAM = (sys.executable, "-c", "from torchrelay.cli.main import main; main()")
NESTED = ["key create", "key list", "key use", "key revoke", "tenant create", "tenant list", "tenant set"]
NESTED += ["models set", "models alias", "models delete", "uploads abort"]
NESTED += ["models show", "models settings", "models versions", "models rollback", "prices set"]


@pytest.mark.parametrize("command", [*COMMANDS, *NESTED])
def test_every_command_has_example(run: Run, command: str) -> None:
    shown = run(*command.split(), "--help")
    assert shown.exit_code == 0
    assert f"torchrelay {command}" in shown.stdout.split("Example:")[1]


def test_help_lists_commands_and_first_steps(run: Run) -> None:
    shown = run("--help").stdout
    assert all(f" {command} " in shown for command in COMMANDS)
    assert "torchrelay key create --tenant acme" in shown


@pytest.mark.parametrize("wrong", [("nonsense",), ("chat",), ("upload", ".", "--max-instances", "-1")])
def test_wrong_usage_is_status_2(run: Run, wrong: tuple[str, ...]) -> None:
    assert run(*wrong).exit_code == 2


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


def test_existing_tenant_is_not_retried(run: Run, home: Home) -> None:
    assert run("tenant", "create", "acme").exit_code == 0
    problem = run("tenant", "create", "acme").exception
    assert isinstance(problem, CliError)
    assert "already" in problem.message
    assert problem.hint == "create a key for it: torchrelay key create --tenant acme"


def test_local_keys_are_not_sent_to_another_gateway(run: Run, home: Home, gateway: FakeGateway) -> None:
    refused = run("models", "--url", "http://127.0.0.1:1")
    assert isinstance(refused.exception, CliError)
    assert "no API key" in refused.exception.message
    assert run("models", "--url", gateway.url + "/v1/").exit_code == 0  # the local one by its address


def test_models_are_listed_as_table_and_json(run: Run, home: Home) -> None:
    shown = run("models").stdout
    assert "acme/tiny" in shown
    assert "1.5 MB" in shown
    assert json.loads(run("models", "--json").stdout)["data"][0]["id"] == "acme/tiny"


def test_model_is_configured_and_deleted(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.published = {"tiny"}
    shown = run("models", "set", "tiny", "--idle-timeout-s", "5")
    assert gateway.asked[-1] == ("PATCH", "/v1/models/tiny", {"idle_timeout_s": 5})
    assert "acme/tiny: idle s 60, max instances per role 2" in shown.stdout
    assert "with the model's next request" in shown.stderr
    assert isinstance(run("models", "set", "tiny").exception, CliError)
    shown = run("models", "set", "tiny", "--engine", "vllm")
    assert gateway.asked.pop()[2] == {"engine": "vllm"} and "acme/tiny: engine vllm" in shown.stdout
    run("models", "set", "tiny", "--engine", "vllm:2")
    assert gateway.asked.pop()[2] == {"engine": "vllm:2"}
    for engine in ("tensorrt", "torchrelay:2", "vllm:1"):
        assert run("models", "set", "tiny", "--engine", engine).exit_code == 2
    entries = ["mon-fri 08:00-18:00 Europe/Berlin = 2", "sat 10:00-16:00 UTC = 1"]
    shown = run("models", "set", "tiny", "--schedule", entries[0], "--schedule", entries[1])
    assert gateway.asked.pop()[2] == {"schedule": entries}
    assert f"acme/tiny: min {entries[0]}\nacme/tiny: min {entries[1]}" in shown.stdout
    run("models", "set", "tiny", "--schedule", "none")
    assert gateway.asked.pop()[2] == {"schedule": []}
    assert isinstance(run("models", "set", "tiny", "--schedule", "none", "--schedule", "x").exception, CliError)
    targets = {"interactive_ttft_s": 0.2, "standard_ttft_s": 0.5, "batch_ttft_s": 60, "tbt_target_s": 0.05}
    options = [word for name, value in targets.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    shown = run("models", "set", "tiny", *options)
    assert gateway.asked.pop()[2] == targets
    first = "first token in 200 ms (interactive), 500 ms (standard), 60 s (batch)"
    assert f"acme/tiny: targets: {first}; 50 ms between tokens\n" in shown.stdout
    shown = run("models", "set", "tiny", "--standard-ttft-s", "0", "--tbt-target-s", "0", "--batch-ttft-s", "9")
    assert gateway.asked.pop()[2] == {"standard_ttft_s": 0, "tbt_target_s": 0, "batch_ttft_s": 9}
    assert "acme/tiny: targets: first token in 9 s (batch)\n" in shown.stdout
    back = "back to the platform's default targets: first token (standard), between tokens"
    assert f"acme/tiny: {back}\n" in shown.stdout
    shown = run("models", "alias", "tiny", "gpt-4o", "claude-x")
    asked: tuple[str, str, Any] = gateway.asked.pop()
    assert asked == ("PUT", "/v1/models/tiny/aliases", {"aliases": ["gpt-4o", "claude-x"]})
    assert shown.stdout == "acme/tiny: aliases gpt-4o, claude-x\n"
    assert run("models", "alias", "tiny").stdout == "acme/tiny: aliases none\n"
    deleted = run("models", "delete", "acme/tiny", "--yes")
    assert deleted.stdout == "deleted acme/tiny\n"
    assert "`torchrelay top` shows" in deleted.stderr
    assert gateway.asked[-1][:2] == ("DELETE", "/v1/models/acme/tiny")
    unknown = run("models", "delete", "other", "--yes").exception
    assert isinstance(unknown, CliError)
    assert (unknown.message, unknown.hint) == ("the model 'other' does not exist", "see: torchrelay models")
    gateway.asked.clear()
    assert run("models", "--url", gateway.url, "delete", "tiny").exit_code == 2
    assert gateway.asked == []


def test_operator_settings_use_admin_key(
    run: Run, home: Home, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.published = {"tiny"}
    home.save_key(TENANT_KEY)
    for option, value in (("--standard-ttft-s", "1.5"), ("--min-instances", "1"), ("--schedule", "none")):
        gateway.keys = {ADMIN_KEY}
        assert run("models", "set", "acme/tiny", option, value).exit_code == 0
        assert run("models", "set", "acme/tiny", option, value, "--url", gateway.url).exit_code == 0
        gateway.keys, gateway.asked = {TENANT_KEY}, []
        assert run("models", "set", "tiny", "--idle-timeout-s", "5").exit_code == 0
        assert [body for *_, body in gateway.asked] == [{"idle_timeout_s": 5}]
        refused = run("models", "set", "tiny", option, value, "--key", TENANT_KEY).exception
        assert isinstance(refused, CliError) and refused.message == f"{option} requires the admin key"
        assert refused.hint == f'pass --key "$(cat {home.path}/admin.key)"'
    monkeypatch.setenv("TORCHRELAY_API_KEY", TENANT_KEY)  # at another gateway than the home's
    refused = run("models", "set", "tiny", "--min-instances", "1", "--url", "http://127.0.0.1:1").exception
    assert isinstance(refused, CliError) and refused.hint == 'pass --key "$(cat HOME/admin.key)"'


def test_deletion_requires_confirmation(
    run: Run, home: Home, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.published = {"tiny"}
    unasked = run("models", "delete", "tiny", said="y\n").exception  # a pipe is nobody who was asked
    assert isinstance(unasked, CliError) and "--yes" in (unasked.hint or "")
    with monkeypatch.context() as patched:
        patched.setattr(models_module, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
        assert run("models", "delete", "tiny", said="n\n").exit_code == 1
        assert gateway.asked == []
        assert "deleted" in run("models", "delete", "tiny", said="y\n").stdout
    assert [asked[:2] for asked in gateway.asked] == [("DELETE", "/v1/models/tiny")]


def test_tenant_limits_are_set(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("tenant", "set", "acme", "--budget", "12.5", "--storage-quota-gb", "none")
    assert gateway.asked[-1] == (
        "PATCH",
        "/v1/tenants/acme",
        {"storage_quota_bytes": None, "budget_nano": 12_500_000_000},
    )
    assert "acme: storage quota no limit, budget $12.50" in shown.stdout
    assert isinstance(run("tenant", "set", "acme").exception, CliError)
    for service_class, sent in (("batch", "batch"), ("none", None)):
        shown = run("tenant", "set", "acme", "--service-class", service_class)
        assert gateway.asked[-1] == ("PATCH", "/v1/tenants/acme", {"service_class": sent})
        assert f"service class {sent or 'standard'}" in shown.stdout
    for wrong in ("-1", "nan", "inf", "much"):
        assert run("tenant", "set", "acme", f"--budget={wrong}").exit_code == 2
        assert run("tenant", "create", "acme", f"--budget={wrong}").exit_code == 2
    refused = run("tenant", "create", "acme", "--storage-quota-gb", "lots")
    assert "--storage-quota-gb" in refused.stderr and "'lots' must be a non-negative number" in refused.stderr


def test_version_is_printed(run: Run) -> None:
    shown = run("--version")
    assert (shown.exit_code, shown.stdout) == (0, f"torchrelay {metadata.version('torchrelay')}\n")


def test_invalid_address_is_refused_before_key(run: Run, home: Home) -> None:
    problem = run("models", "--url", "localhost:8080").exception
    assert isinstance(problem, CliError)
    assert "--url: 'localhost:8080' is not a valid address" in problem.message


def test_errors_name_options_instead_of_api_fields() -> None:
    def said(message: str, param: str) -> str:
        return api_error(json.dumps({"error": {"message": message, "param": param}}).encode(), 400).message

    assert said("'x' is no time", "from") == "--from: 'x' is no time"
    assert said("'x' is no month: write it like 2026-11", "period") == "--month: 'x' is no month: write it like 2026-11"
    assert said("budget_nano must be at least 0, not -1", "budget_nano") == "--budget must be at least 0, not -1"
    assert said("tbt_target_s: a target is", "tbt_target_s") == "--tbt-target-s: a target is"
    assert said("'soon' is no time", "from") == "--from: 'soon' is no time"
    assert said("is not valid JSON", "config.json") == "is not valid JSON (config.json)"
    for field in ("upload_id", "key_id", "request_id", "name"):  # of paths and bodies that no option names
        assert said("open upload 'x' not found", field) == "open upload 'x' not found"
    assert said("config.json is not valid JSON", "config.json") == "config.json is not valid JSON"


def test_unknown_model_has_no_decisions(run: Run, home: Home, gateway: FakeGateway) -> None:
    for name in ("nothing", "acme/nothing"):
        problem = run("explain", name).exception
        assert isinstance(problem, ApiError)
        assert problem.hint == "see: torchrelay models"


def test_name_of_other_tenant_is_refused_before_reading(
    run: Run, home: Home, gateway: FakeGateway, model_folder: Path
) -> None:
    home.save_key(TENANT_KEY)
    refusal = run("upload", str(model_folder), "--name", "zoo/tiny").exception
    assert isinstance(refusal, CliError)
    assert (refusal.message, refusal.hint) == (
        "this key is acme's, not zoo's",
        "pass --name acme/..., or a key of zoo",
    )
    unknown = run("upload", str(model_folder), "--name", "zoo/tiny", "--key", ADMIN_KEY).exception
    assert isinstance(unknown, CliError)
    assert unknown.hint == "create it: torchrelay tenant create zoo"
    assert all(method == "GET" for method, _, _ in gateway.asked)
    assert run("upload", str(model_folder), "--name", "acme/tiny").exit_code == 0


def test_unchanged_upload_is_reported(run: Run, home: Home, gateway: FakeGateway, model_folder: Path) -> None:
    home.save_key(TENANT_KEY)
    assert "published acme/tiny" in run("upload", str(model_folder)).stdout
    gateway.published = {"tiny"}
    assert "unchanged acme/tiny" in run("upload", str(model_folder)).stdout


def test_notes_about_weights_are_shown(run: Run, home: Home, gateway: FakeGateway, model_folder: Path) -> None:
    home.save_key(TENANT_KEY)
    assert "note:" not in run("upload", str(model_folder)).stderr
    gateway.notes = ("tensors were left out: '[bold]score.weight'",)
    shown = " ".join(run("upload", str(model_folder)).stderr.split())
    assert "note: tensors were left out: '[bold]score.weight'" in shown


def test_gguf_file_is_converted_and_uploaded(
    run: Run, home: Home, gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.save_key(TENANT_KEY)
    path = write_gguf(tmp_path / "Tiny.Q8_0.gguf", make_checkpoint(tmp_path / "hf", "llama"), "Q8_0")
    assert "published acme/tiny" in run("upload", str(path)).stdout
    begun = next(body for method, path, body in gateway.asked if (method, path) == ("POST", "/v1/uploads"))
    assert begun["model"] == "tiny.q8_0"
    documents = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(gateway.received) == {*documents, "chat_template.jinja", "model.safetensors"}
    gateway.asked = []
    monkeypatch.setattr(Conversion, "write", lambda *_: pytest.fail("converted for a key that may not publish"))
    for name, key, said in (("zoo/tiny", TENANT_KEY, "this key is acme's"), ("tiny", "sk-nobody", "key")):
        refused = run("upload", str(path), "--name", name, "--key", key).exception
        assert isinstance(refused, CliError) and said in refused.message
    gateway.asked = []
    path.write_bytes(path.read_bytes()[:5000])
    refused = run("upload", str(path)).exception
    assert isinstance(refused, CliError)
    assert refused.message.startswith(f"{path}: blk.0.attn_q.weight: it needs 8 bytes")
    assert gateway.asked == []


def test_weights_are_quantized_and_uploaded(run: Run, home: Home, gateway: FakeGateway, tmp_path: Path) -> None:
    """Of a folder, and of a GGUF file."""
    home.save_key(TENANT_KEY)
    folder = make_checkpoint(tmp_path / "tiny", "llama")
    for source in folder, write_gguf(tmp_path / "tiny.gguf", folder, "Q8_0"):
        gateway.received.clear()
        assert "published acme/tiny" in run("upload", str(source), "--quantize", "int8").stdout
        config = json.loads(gateway.received["config.json"])
        assert config["quantization_config"]["format"] == "int-quantized"
        assert len(gateway.received["model.safetensors"]) < 0.75 * (folder / "model.safetensors").stat().st_size
    refused = run("upload", str(folder), "--quantize", "int4")
    assert refused.exit_code == 2


def test_usage_shows_cost(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("usage", "--from", "2026-11-01", "--tenant", "acme").stdout
    assert "1,200" in shown
    assert "$0.000015000" in shown
    assert gateway.asked[-1][1] == "/v1/usage?group_by=model&from=2026-11-01&tenant=acme"


def test_open_uploads_are_listed_and_aborted(run: Run, home: Home, gateway: FakeGateway) -> None:
    assert "no open uploads" in run("uploads").stderr
    gateway.declared = {"config.json": {"path": "config.json", "size": 0, "sha256": ""}}
    listed = run("uploads").stdout
    assert "upl-1" in listed and "acme/tiny" in listed and "1.5 MB" in listed
    assert "aborted upl-1" in run("uploads", "abort", "upl-1").stdout
    assert gateway.declared == {}
    assert run("uploads", "--json", "abort", "upl-1").exit_code == 2


def test_model_is_named_after_folder(run: Run, home: Home, gateway: FakeGateway, model_folder: Path) -> None:
    hint = run("upload", str(model_folder)).exception
    assert isinstance(hint, CliError)
    assert "key create" in hint.hint
    home.save_key(TENANT_KEY)
    shown = run("upload", str(model_folder), "--idle-timeout-s", "5")
    assert shown.exit_code == 0, shown.exception
    assert "published acme/tiny" in shown.stdout
    begun = next(body for method, path, body in gateway.asked if (method, path) == ("POST", "/v1/uploads"))
    assert begun["model"] == "tiny"
    assert gateway.asked[-1][2] == {"idle_timeout_s": 5}


def test_question_streams_to_standard_output(run: Run, home: Home) -> None:
    hint = run("chat", "tiny", "hi").exception
    assert isinstance(hint, CliError)
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
        assert isinstance(run("chat", "tiny", said=said).exception, CliError)
    for empty in ("", " \n"):
        num_asked = len(gateway.asked)
        refused = run("chat", "tiny", empty).exception
        assert isinstance(refused, CliError) and refused.message == "the question is empty"
        assert len(gateway.asked) == num_asked
    assert isinstance(run("chat", "tiny", "\udcff").exception, CliError)  # an argument that is no UTF-8


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("arguments", [("models",), ("chat", "tiny", "hi"), ("--help",)])
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
    other = run("--home", str(home.path), "models", "--url", "http://127.0.0.1:1", "--key", TENANT_KEY).exception
    assert isinstance(other, CliError) and "does not answer" in other.message


def test_typed_text_does_not_mix_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    outside, inside = os.openpty()
    with open(inside) as keyboard, open(outside, "wb", buffering=0) as fingers:
        monkeypatch.setattr("sys.stdin", keyboard)
        with chat_module.quiet_keyboard():
            assert not termios.tcgetattr(inside)[3] & termios.ECHO
            fingers.write(b"next question\n")
        assert termios.tcgetattr(inside)[3] & termios.ECHO
        assert keyboard.readline() == "next question\n"


def test_key_id_is_extracted() -> None:
    assert id_of("tr-abc-secret") == "abc"
    assert id_of("abc") == "abc"
    assert id_of(ADMIN_KEY) == ADMIN_KEY


def test_usage_of_unknown_names_says_so(run: Run, home: Home, gateway: FakeGateway) -> None:
    home.save_key(TENANT_KEY)
    gateway.published.add("tiny")
    gateway.owners["key-1"] = "acme"
    assert "no usage yet" in run("usage", "--model", "tiny", "--key-id", "key-1").stderr
    unknown = run("usage", "--model", "other").exception
    assert isinstance(unknown, CliError) and unknown.message == "the model 'other' does not exist"
    unknown = run("usage", "--key-id", "key-2").exception
    assert isinstance(unknown, CliError) and unknown.message == "the key 'key-2' does not exist"

"""Models and keys of a tenant: lists, settings, versions, uploads, prices, usage, and which key counts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.support.checkpoints import make_checkpoint
from tests.support.int8_checkpoints import int8_checkpoint
from tests.unit.cli.conftest import CONFIG, Run, refusal
from tests.unit.cli.fake_gateway import ADMIN_KEY, MODEL, PRICE, TENANT_KEY, FakeGateway
from tests.unit.cli.gguf.gguf_files import write_gguf
from torchrelay.cli.commands import models as models_module
from torchrelay.cli.commands.key import id_of, keys_table
from torchrelay.cli.commands.models import models_table
from torchrelay.cli.commands.prices import current_price
from torchrelay.cli.commands.uploads import uploads_table
from torchrelay.cli.commands.usage import usage_table
from torchrelay.cli.errors import CliError
from torchrelay.cli.gguf.conversion import Conversion
from torchrelay.cli.home import Home

OWN = PRICE | {"model": "acme/tiny", "prompt_nano": 1, "valid_from": "2026-01-01T00:00:00+00:00"}
ENDED = PRICE | {"prompt_nano": 7_500, "valid_to": "2026-01-01T00:00:00+00:00"}
LONG = "birch-company-of-the-north/glossary-with-a-long-name-instruct-2"
TIMES = {"created": 1_790_000_000, "expires": 1_790_086_400}


def test_models_are_listed_as_table_and_json(run: Run, home: Home) -> None:
    shown = run("models").stdout
    assert "acme/tiny" in shown
    assert "1.5 MB" in shown
    assert json.loads(run("models", "--json").stdout)["data"][0]["id"] == "acme/tiny"


def test_lists_of_long_names_keep_the_other_columns() -> None:
    """At 80 columns only names are shortened, in their middle."""
    key = {"id": "8x2kq0v3m1c9d7fz", "tenant": LONG.partition("/")[0], "name": "laptop of the office", **TIMES}
    upload = {"id": "upl-0v3m1c9d7fz8x2kq", "model": LONG, "size_bytes": 10**9, **TIMES}
    numbers = {name: 12_345_678 for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")}
    usage = {"data": [{"model": LONG, "cost": "12.000015000", **numbers}], "total": numbers | {"cost": "1.000000000"}}
    for table, whole in (
        (models_table([MODEL | {"id": LONG}]), ("computed", "1.5 MB", "2026-09-2")),
        (keys_table([key], is_small=True), ("8x2kq0v3m1c9d7fz", "no limit", "2026-09-2", "active")),
        (uploads_table([upload], is_small=True), ("upl-0v3m1c9d7fz8x2kq", "1 GB", "2026-09-2")),
        (usage_table(usage, "model"), ("12,345,678", "$12.000015000")),
    ):
        console = Console(width=80, force_terminal=False)
        with console.capture() as captured:
            console.print(table)
        (line,) = [line for line in captured.get().splitlines() if "birch" in line]
        assert all(words in line for words in whole) and "…" in line and len(line) <= 80


def test_adapter_is_listed_with_its_base() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(models_table([MODEL | {"id": "acme/tuned", "parent": "acme/base"}]))
    assert "acme/tuned: adapter of acme/base" in captured.get()


WEEK, SATURDAY = "mon-fri 08:00-18:00 Europe/Berlin = 2", "sat 10:00-16:00 UTC = 1"
TARGETS = {"interactive_ttft_s": 0.2, "standard_ttft_s": 0.5, "batch_ttft_s": 60, "tbt_target_s": 0.05}
DEFAULTS = "back to the platform's default targets: first token (standard), between tokens"
SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("--idle-timeout-s|5", {"idle_timeout_s": 5}, ["idle s computed, max instances per role 2"]),
    ("--engine|vllm", {"engine": "vllm"}, ["engine vllm"]),
    ("--engine|vllm:2", {"engine": "vllm:2"}, ["engine vllm:2"]),
    (f"--schedule|{WEEK}|--schedule|{SATURDAY}", {"schedule": [WEEK, SATURDAY]}, [f"min {WEEK}", f"min {SATURDAY}"]),
    ("--schedule|none", {"schedule": []}, []),
    (
        "--max-concurrency|8|--threads|4|--kv-share|0.5|--hosts|zone=a|--hosts|gpu=l4",
        {"max_concurrency": 8, "threads": 4, "kv_share": 0.5, "hosts": ["gpu=l4", "zone=a"]},
        [
            "requests 8 at once per instance",
            "threads 4 per instance, on a CPU",
            "share of KV 0.5 of an instance's pool",
            "hosts with gpu=l4, zone=a",
        ],
    ),
    ("--hosts|none|--kv-share|1", {"kv_share": 1.0, "hosts": []}, []),
    (
        "--interactive-ttft-s|0.2|--standard-ttft-s|0.5|--batch-ttft-s|60|--tbt-target-s|0.05",
        TARGETS,
        ["targets: first token in 200 ms (interactive), 500 ms (standard), 60 s (batch); 50 ms between tokens"],
    ),
    (
        "--standard-ttft-s|0|--tbt-target-s|0|--batch-ttft-s|9",
        {"standard_ttft_s": 0, "tbt_target_s": 0, "batch_ttft_s": 9},
        ["targets: first token in 9 s (batch)", DEFAULTS],
    ),
]


def test_model_is_configured(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.published = {"tiny"}
    for options, body, lines in SETTINGS:
        shown = run("models", "set", "tiny", *options.split("|"))
        assert gateway.asked.pop() == ("PATCH", "/v1/models/tiny", body)
        assert {f"acme/tiny: {line}" for line in lines} <= {*shown.stdout.splitlines()}
        assert "--idle-timeout-s" not in options or "with the model's next request" in shown.stderr
    for refused in ((), *((option, "none", option, "x=y") for option in ("--schedule", "--hosts"))):
        refusal(run("models", "set", "tiny", *refused))
    for engine in ("tensorrt", "torchrelay:2", "vllm:1"):
        assert run("models", "set", "tiny", "--engine", engine).exit_code == 2
    for option, value in (("--kv-share", "0"), ("--kv-share", "1.1"), ("--hosts", "zone"), ("--threads", "-1")):
        assert run("models", "set", "tiny", option, value).exit_code == 2
    assert gateway.asked == []


def test_model_gets_aliases_and_is_deleted(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.published = {"tiny"}
    shown = run("models", "alias", "tiny", "gpt-4o", "claude-x")
    asked: tuple[str, str, Any] = gateway.asked.pop()
    assert asked == ("PUT", "/v1/models/tiny/aliases", {"aliases": ["gpt-4o", "claude-x"]})
    assert shown.stdout == "acme/tiny: aliases gpt-4o, claude-x\n"
    assert run("models", "alias", "tiny").stdout == "acme/tiny: aliases none\n"
    deleted = run("models", "delete", "acme/tiny", "--yes")
    assert deleted.stdout == "deleted acme/tiny\n" and "`torchrelay top` shows" in deleted.stderr
    assert gateway.asked[-1][:2] == ("DELETE", "/v1/models/acme/tiny")
    unknown = refusal(run("models", "delete", "other", "--yes"))
    assert (unknown.message, unknown.hint) == ("the model 'other' does not exist", "see: torchrelay models")
    gateway.asked.clear()
    assert run("models", "--url", gateway.url, "delete", "tiny").exit_code == 2
    assert gateway.asked == []


def test_operator_settings_use_admin_key(
    run: Run, home: Home, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.published = {"tiny"}
    home.save_key(TENANT_KEY)
    for option, value in (
        ("--standard-ttft-s", "1.5"),
        ("--min-instances", "1"),
        ("--schedule", "none"),
        ("--kv-share", "0.5"),
    ):
        gateway.keys = {ADMIN_KEY}
        assert run("models", "set", "acme/tiny", option, value).exit_code == 0
        assert run("models", "set", "acme/tiny", option, value, "--url", gateway.url).exit_code == 0
        gateway.keys, gateway.asked = {TENANT_KEY}, []
        assert run("models", "set", "tiny", "--idle-timeout-s", "5").exit_code == 0
        assert [body for *_, body in gateway.asked] == [{"idle_timeout_s": 5}]
        refused = refusal(run("models", "set", "tiny", option, value, "--key", TENANT_KEY))
        assert refused.message == f"{option} requires the admin key"
        assert refused.hint == f'pass --key "$(cat {home.path}/admin.key)"'
    monkeypatch.setenv("TORCHRELAY_API_KEY", TENANT_KEY)  # at another gateway than the home's
    refused = refusal(run("models", "set", "tiny", "--min-instances", "1", "--url", "http://127.0.0.1:1"))
    assert refused.hint == 'pass --key "$(cat HOME/admin.key)"'


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


def a_version(version_id: str, *, is_current: bool = False) -> dict[str, Any]:
    times = {"replaced": None, "kept_until": None} if is_current else {"replaced": 1, "kept_until": 541}
    return {"id": version_id, "architecture": "LlamaForCausalLM", "dtype": "F32", "size_bytes": 10**9, **times}


def test_versions_are_listed(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.versions = [a_version("0123456789abcdef", is_current=True), a_version("fedcba9876543210")]
    lines = run("models", "versions", "acme/tiny").stdout.splitlines()[3:5]
    assert lines[0].split() == ["0123456789ab", "LlamaForCausalLM", "F32", "1", "GB", "current"]
    assert lines[1].split()[:6] == ["fedcba987654", "LlamaForCausalLM", "F32", "1", "GB", "replaced"]
    assert gateway.asked[-1][1] == "/v1/versions?model=acme%2Ftiny"
    assert json.loads(run("models", "versions", "tiny", "--json").stdout) == {"data": gateway.versions}


def test_model_is_rolled_back(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("models", "rollback", "tiny")
    assert gateway.asked.pop() == ("POST", "/v1/models/tiny/rollback", {})
    assert shown.stdout == "acme/tiny: version fedcba987654 is current again\n"
    ids = ["0123456789abcdef", "fedcba9876543210", "fedc000000000000"]
    gateway.versions = [a_version(ids[0], is_current=True), a_version(ids[1]), a_version(ids[2])]
    run("models", "rollback", "tiny", "fedc0")
    assert gateway.asked.pop()[2] == {"version": ids[2]}
    for begin, message in (("fedc", "several versions begin"), ("0123", "no replaced version begins")):
        refused = refusal(run("models", "rollback", "tiny", begin))
        assert refused.message == f"{message} with {begin!r}"
        assert refused.hint == "replaced versions that are kept: fedcba987654, fedc00000000"


def test_model_is_shown_with_settings_and_price(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.published, gateway.prices = {"tiny"}, [PRICE, OWN]
    shown = run("models", "show", "acme/tiny").stdout
    for words in ("0123456789ab", "1.5 MB", "512 tokens", "computed", "2 per role", "prompt $0.001", "to zero"):
        assert words in shown
    assert json.loads(run("models", "show", "tiny", "--json").stdout)["price"] == OWN
    settings = run("models", "settings", "tiny")
    assert "schedule" in settings.stdout and "version" not in settings.stdout
    assert "torchrelay models set tiny" in settings.stderr
    assert json.loads(run("models", "settings", "tiny", "--json").stdout)["max_instances"] == 2


def test_name_of_other_tenant_is_refused_before_reading(
    run: Run, home: Home, gateway: FakeGateway, model_folder: Path
) -> None:
    home.save_key(TENANT_KEY)
    refused = refusal(run("upload", str(model_folder), "--name", "zoo/tiny"))
    assert (refused.message, refused.hint) == ("this key is acme's, not zoo's", "pass --name acme/..., or a key of zoo")
    unknown = refusal(run("upload", str(model_folder), "--name", "zoo/tiny", "--key", ADMIN_KEY))
    assert unknown.hint == "create it: torchrelay tenant create zoo"
    gateway.tenants.add("acme")
    near = refusal(run("upload", str(model_folder), "--name", "acne/tiny", "--key", ADMIN_KEY))
    assert near.message == "tenant 'acne' does not exist; did you mean acme?"
    assert all(method == "GET" for method, _, _ in gateway.asked)
    assert run("upload", str(model_folder), "--name", "acme/tiny").exit_code == 0


def test_unchanged_upload_and_notes_about_weights_are_shown(
    run: Run, home: Home, gateway: FakeGateway, model_folder: Path
) -> None:
    home.save_key(TENANT_KEY)
    shown = run("upload", str(model_folder))
    assert "published acme/tiny" in shown.stdout and "note:" not in shown.stderr
    gateway.published, gateway.notes = {"tiny"}, ("tensors were left out: '[bold]score.weight'",)
    shown = run("upload", str(model_folder))
    assert "unchanged acme/tiny" in shown.stdout
    assert "note: tensors were left out: '[bold]score.weight'" in " ".join(shown.stderr.split())
    assert "torchrelay chat" not in shown.stderr and "no chat template" in shown.stderr
    (model_folder / "chat_template.jinja").touch()
    assert "next: torchrelay chat acme/tiny" in run("upload", str(model_folder)).stderr


def test_an_engine_that_no_worker_has_is_refused_before_files_are_sent(
    run: Run, home: Home, gateway: FakeGateway, model_folder: Path
) -> None:
    home.save_key(TENANT_KEY)
    no_worker = "no worker has the engine vllm"
    assert no_worker in refusal(run("upload", str(model_folder), "--engine", "vllm:2")).message
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (model_folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": awq}))
    assert no_worker in refusal(run("upload", str(model_folder))).message
    wrong = refusal(run("upload", str(model_folder), "--engine", "torchrelay"))
    assert wrong.message == "the weights need the engine vllm, not torchrelay"
    assert not gateway.received


def test_gguf_file_is_converted_and_uploaded(
    run: Run, home: Home, gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.save_key(TENANT_KEY)
    path = write_gguf(tmp_path / "Tiny.Q8_0.gguf", make_checkpoint(tmp_path / "hf", "llama"), "Q8_0")
    monkeypatch.setattr("torchrelay.cli.gguf.conversion.unused_templates", lambda _: ["rag"])
    shown = run("upload", str(path))
    assert "published acme/tiny" in shown.stdout and "note: the upload leaves out rag" in " ".join(shown.stderr.split())
    begun = next(body for method, path, body in gateway.asked if (method, path) == ("POST", "/v1/uploads"))
    assert begun["model"] == "tiny.q8_0"
    documents = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(gateway.received) == {*documents, "chat_template.jinja", "model.safetensors"}
    gateway.asked = []
    monkeypatch.setattr(Conversion, "write", lambda *_: pytest.fail("converted for a key that may not publish"))
    for name, key, said in (("zoo/tiny", TENANT_KEY, "this key is acme's"), ("tiny", "sk-nobody", "key")):
        refused = refusal(run("upload", str(path), "--name", name, "--key", key))
        assert said in refused.message
    gateway.asked = []
    path.write_bytes(path.read_bytes()[:5000])
    refused = refusal(run("upload", str(path)))
    assert refused.message.startswith(f"{path}: blk.0.attn_q.weight: it needs 8 bytes")
    assert gateway.asked == []


def test_weights_are_sent_whole_and_quantized_at_the_commit(
    run: Run, home: Home, gateway: FakeGateway, tmp_path: Path
) -> None:
    """Of a folder, and of a GGUF file."""
    home.save_key(TENANT_KEY)
    folder = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16")
    for source in folder, write_gguf(tmp_path / "tiny.gguf", folder, "Q8_0"):
        gateway.received.clear()
        assert "published acme/tiny" in run("upload", str(source), "--quantize", "int8").stdout
        assert "quantization_config" not in json.loads(gateway.received["config.json"])
        assert len(gateway.received["model.safetensors"]) > 0.95 * (folder / "model.safetensors").stat().st_size
        begun = next(
            body for method, path, body in reversed(gateway.asked) if (method, path) == ("POST", "/v1/uploads")
        )
        assert (begun["engine"], gateway.asked[-1][2]) == ("torchrelay", {"quantize": "int8"})
    gateway.asked = []
    again = refusal(run("upload", str(int8_checkpoint(folder)), "--quantize", "int8"))
    assert "the weights are quantized already" in again.message
    assert gateway.asked == []
    refused = run("upload", str(folder), "--quantize", "int4")
    assert refused.exit_code == 2


def test_open_uploads_are_listed_and_aborted(run: Run, home: Home, gateway: FakeGateway) -> None:
    assert "no open uploads" in run("uploads").stderr
    gateway.declared = {"config.json": {"path": "config.json", "size": 0, "sha256": ""}}
    listed = run("uploads").stdout
    assert "upl-1" in listed and "acme/tiny" in listed and "1.5 MB" in listed
    assert "aborted upl-1" in run("uploads", "abort", "upl-1").stdout
    assert gateway.declared == {}
    assert run("uploads", "--json", "abort", "upl-1").exit_code == 2


def test_model_is_named_after_folder(run: Run, home: Home, gateway: FakeGateway, model_folder: Path) -> None:
    hint = refusal(run("upload", str(model_folder)))
    assert "key create" in hint.hint
    home.save_key(TENANT_KEY)
    shown = run("upload", str(model_folder), "--idle-timeout-s", "5")
    assert shown.exit_code == 0, shown.exception
    assert "published acme/tiny" in shown.stdout
    begun = next(body for method, path, body in gateway.asked if (method, path) == ("POST", "/v1/uploads"))
    assert begun["model"] == "tiny"
    assert gateway.asked[-1][2] == {"idle_timeout_s": 5}


def test_prices_are_listed(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.prices = [ENDED, PRICE, OWN]
    lines = run("prices").stdout.splitlines()
    assert [line.split() for line in lines[3:5]] == [
        ["(default)", "$0.100", "$0.025", "$0.400"],
        ["acme/tiny", "$0.001", "$0.025", "$0.400", "2026-01-01", "00:00"],
    ]
    assert "$7.500" not in run("prices").stdout and "$7.500" in run("prices", "--all").stdout
    assert json.loads(run("prices", "--json").stdout)["data"][1] == PRICE


def test_price_is_set_with_the_admin_key(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("prices", "set", "acme/tiny", "--prompt", "0.2", "--output", "1", "--from", "2027-01-01")
    nano = {"prompt_nano": 200, "cached_nano": 200, "output_nano": 1000}
    assert gateway.asked.pop() == ("PUT", "/v1/prices", nano | {"model": "acme/tiny", "valid_from": "2027-01-01"})
    assert "acme/tiny: prompt $0.200, cached $0.200, output $1.000 from 2027-01-01 UTC" in shown.stdout
    run("prices", "set", "--prompt", "0.2", "--cached", "0", "--output", "1")
    assert gateway.asked.pop()[2] == nano | {"cached_nano": 0}
    for wrong in ("-1", "0.0001", "nan", "inf", "much"):
        assert run("prices", "set", "--prompt", wrong, "--output", "1").exit_code == 2
    above = run("prices", "set", "--prompt", "0.2", "--cached", "0.3", "--output", "1")
    assert above.exit_code == 2 and "--cached must be at most --prompt (0.2), not 0.3" in " ".join(above.stderr.split())


def test_own_price_applies_before_the_default() -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    later = OWN | {"valid_from": "2027-01-01T00:00:00+00:00"}
    assert current_price([ENDED, PRICE, OWN], "acme/tiny", now) == OWN
    for prices, name in (([ENDED, PRICE, OWN], "acme/other"), ([PRICE, later], "acme/tiny")):
        assert current_price(prices, name, now) == PRICE


def test_usage_shows_cost_and_unknown_names(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("usage", "--from", "2026-11-01", "--tenant", "acme").stdout
    assert "1,200" in shown and "$0.000015000" in shown
    assert gateway.asked[-1][1] == "/v1/usage?group_by=model&from=2026-11-01&tenant=acme"
    home.save_key(TENANT_KEY)
    gateway.published.add("tiny")
    gateway.owners["key-1"] = "acme"
    assert "no usage yet" in run("usage", "--model", "tiny", "--key-id", "key-1").stderr
    for near in ("tinny", "acme/tiy", "acne/tiny"):
        assert refusal(run("usage", "--model", near)).hint == "did you mean acme/tiny?"
    assert refusal(run("usage", "--key-id", "key-11")).hint == "did you mean key-1?"
    unknown = refusal(run("usage", "--model", "other"))
    assert unknown.message == "the model 'other' does not exist"
    unknown = refusal(run("usage", "--key-id", "key-2"))
    assert unknown.message == "the key 'key-2' does not exist"


def test_usage_is_exported_as_it_arrives(run: Run, home: Home, gateway: FakeGateway, tmp_path: Path) -> None:
    lines = '{"id": 7}\n{"id": 9}\n'
    assert run("usage", "export", "--after", "6", "--limit", "2").stdout == lines
    assert gateway.asked[-1][1] == "/v1/usage/export?format=jsonl&after=6&limit=2"
    assert run("usage", "export", "--format", "focus", "--output", str(tmp_path / "x.csv")).stdout == ""
    assert (tmp_path / "x.csv").read_text() == lines
    assert run("usage", "--by", "day", "export").exit_code == 2


def test_bill_is_shown_adjusted_and_closed(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("bill", "--month", "2026-01", "--tenant", "acme").stdout
    assert all(text in shown for text in ("number 4", "outage", "-12.50 USD"))
    assert gateway.asked[-1][1] == "/v1/invoices/2026-01?tenant=acme"
    assert run("bill", "--tenant", "acme", "--format", "csv").stdout == "item,amount\nTotal,2.00\n"
    closed = run("bill", "close", "2026-01").stdout
    assert "acme" in closed and gateway.asked[-1][:2] == ("POST", "/v1/invoices/2026-01/close")
    adjusting = ("bill", "adjust", "acme", "--month", "2026-01", "--reason", "outage", "--amount")
    assert "-12.50 dollars" in run(*adjusting, "-12.50").stdout
    body = {"tenant": "acme", "period": "2026-01", "amount_nano": -12_500_000_000, "reason": "outage"}
    assert gateway.asked[-1] == ("POST", "/v1/adjustments", body)
    for wrong in ("0", "much", "nan", "0.0000000001"):
        assert run(*adjusting, wrong).exit_code == 2


def test_first_key_creates_tenant_and_is_saved(run: Run, home: Home, gateway: FakeGateway) -> None:
    made = run("key", "create", "--tenant", "acme", "--name", "laptop")
    assert made.exit_code == 0, made.exception
    assert made.stdout == TENANT_KEY + "\n"
    assert "created tenant acme" in made.stderr
    assert home.saved_key() == TENANT_KEY
    again = run("key", "create", "--tenant", "acme", "--no-save")
    assert "created tenant" not in again.stderr
    replaced = run("key", "create", "--tenant", "acme")
    assert "saved as this home's key; the previous one stays valid" in replaced.stderr
    revoked = run("key", "revoke", TENANT_KEY)
    assert gateway.asked[-1][:2] == ("DELETE", "/v1/keys/8x2kq0v3m1c9d7fz")
    assert revoked.exit_code == 0
    assert home.saved_key() is None


def test_key_of_other_tenant_prints_new_tenant(run: Run, home: Home, gateway: FakeGateway) -> None:
    run("key", "create", "--tenant", "acme")
    gateway.next_key = "tr-0123456789abcdef-secret"
    said = run("key", "create", "--tenant", "birch").stderr
    assert "saved as this home's key: commands now act as tenant birch (before: acme)" in said
    assert "back: torchrelay key use acme" in said
    home.save_key("tr-gone-secret")
    said = run("key", "create", "--tenant", "birch").stderr
    assert "saved as this home's key: commands now act as tenant birch\n" in said


def test_unprintable_key_is_not_created(run: Run, home: Home, gateway: FakeGateway) -> None:
    run("key", "create", "--tenant", "acme")
    gateway.asked.clear()
    gateway.lists_keys = False
    refused = run("key", "create", "--tenant", "birch")
    assert str(refused.exception) == "the database cannot be reached"
    assert [method for method, _, _ in gateway.asked] == ["GET"]
    assert home.saved_key() == TENANT_KEY


def test_environment_key_overrides_saved_key(home: Home, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_API_KEY", "of-an-earlier-home")
    said = run("key", "create", "--tenant", "acme").stderr
    assert "unset TORCHRELAY_API_KEY; commands then act as tenant acme" in " ".join(said.split())


def test_key_has_service_class(run: Run, home: Home, gateway: FakeGateway) -> None:
    assert run("key", "create", "--tenant", "acme", "--service-class", "batch").exit_code == 0
    assert gateway.asked[-1] == ("POST", "/v1/keys", {"tenant": "acme", "service_class": "batch"})
    assert run("key", "create", "--tenant", "acme", "--service-class", "flex").exit_code == 2


def test_kept_keys_are_used_by_tenant(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.published = {"tiny"}
    assert "no keys are kept" in run("key", "use").stderr
    run("key", "create", "--tenant", "acme")
    gateway.next_key = "tr-0123456789abcdef-secret"
    run("key", "create", "--tenant", "birch")
    assert run("key", "use").stdout == "acme\nbirch (in use)\n"
    gateway.keys = {TENANT_KEY}
    assert run("models", "set", "acme/tiny", "--max-instances", "1").exit_code == 0  # by the key of the model's tenant
    unknown = refusal(run("models", "set", "acme/other", "--max-instances", "1"))
    assert unknown.hint.startswith("this key is of tenant acme; ")
    refusal(run("models"))
    assert "act as tenant acme" in run("key", "use", "acme").stderr
    assert run("models").exit_code == 0 and home.saved_key() == TENANT_KEY
    refused = refusal(run("key", "use", "cedar"))
    assert "kept: acme, birch" in refused.hint


def test_key_id_is_extracted() -> None:
    assert [id_of(key) for key in ("tr-abc-secret", "abc", ADMIN_KEY)] == ["abc", "abc", ADMIN_KEY]

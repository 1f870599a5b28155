"""`torchrelay batch`: requests in a file, run together at the price of batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import rich.progress
import typer

from torchrelay.cli.api.access import Access, HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.polling import looks
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.console import ResultTable

EXAMPLE = (
    "Example:  torchrelay batch create input.jsonl --endpoint /v1/chat/completions --wait\n\n"
    "Then:     torchrelay batch results ID --output results.jsonl"
)
_ENDED = ("completed", "failed", "expired", "cancelled")
app = typer.Typer(no_args_is_help=True, help="Create, show, list and cancel batches of requests; print their results.")
BatchArgument = Annotated[str, typer.Argument(metavar="ID", help="As `torchrelay batch list` shows it.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Show the progress until the batch has ended.")]


@app.command(epilog=EXAMPLE)
def create(
    file: Annotated[Path, typer.Argument(help="A request per line: custom_id, method, url and body, in JSON.")],
    endpoint: Annotated[
        str, typer.Option(help="Path of all its requests, such as /v1/chat/completions.", metavar="PATH")
    ],
    wait: WaitOption = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a file of requests and run them, within a day, at the price of batches."""
    access = tenant_access(home, url, key)
    access.require_tenant("a batch")
    with access.client() as client, file.open("rb") as content:
        files = {"file": (file.name, content, "application/jsonl")}
        sent = client.call("POST", "/v1/files", data={"purpose": "batch"}, files=files)
        body = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = client.call("POST", "/v1/batches", json=body)
        if wait:
            batch = _waited(access, client, batch["id"])
    _print(batch, as_json)


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many, the newest first.")] = 20,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the batches of this key's tenant (all, with the admin key)."""
    with tenant_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/batches", params={"limit": limit})
    if as_json:
        console.print_json(listed)
    elif not listed["data"]:
        console.err().print("no batches")
    else:
        console.out().print(_table(listed["data"]))


@app.command()
def show(
    batch_id: BatchArgument,
    wait: WaitOption = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a batch: its state, and how many of its requests have ended."""
    access = tenant_access(home, url, key)
    with access.client() as client:
        batch = _waited(access, client, batch_id) if wait else _batch(client, batch_id)
    _print(batch, as_json)


@app.command()
def cancel(
    batch_id: BatchArgument,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a batch with the results that it has; requests under way are not billed."""
    with tenant_access(home, url, key).client() as client:
        batch = client.call("POST", f"/v1/batches/{quote(batch_id)}/cancel")
    _print(batch, as_json)


@app.command()
def results(
    batch_id: BatchArgument,
    errors: Annotated[bool, typer.Option("--errors", help="The requests that failed instead.")] = False,
    output: Annotated[Path | None, typer.Option(help="File for them; default: standard output.")] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Print the answers of a batch that has ended, a line of JSON for each request."""
    with tenant_access(home, url, key).client() as client:
        batch = _batch(client, batch_id)
        if batch["status"] not in _ENDED:
            raise CliError(f"the batch is {batch['status']}", f"wait for it: torchrelay batch show {batch_id} --wait")
        file_id = batch["error_file_id" if errors else "output_file_id"]
        if file_id is None:
            hint = f"see: torchrelay batch show {batch_id}"
            raise CliError(f"no request of the batch has {'failed' if errors else 'succeeded'}", hint)
        with client.stream("GET", f"/v1/files/{quote(file_id)}/content") as lines:
            if output is None:
                _write(lines, sys.stdout.buffer)
            else:
                with output.open("wb") as file:
                    _write(lines, file)


def _write(lines: Iterable[bytes], file: Any) -> None:
    for line in lines:
        file.write(line + b"\n")


def _batch(client: GatewayClient, batch_id: str) -> dict[str, Any]:
    return client.call("GET", f"/v1/batches/{quote(batch_id)}")


def _waited(access: Access, client: GatewayClient, batch_id: str) -> dict[str, Any]:
    """The batch once it has ended; draws a bar until then, on standard error."""
    columns = "{task.description}", rich.progress.BarColumn(), rich.progress.MofNCompleteColumn()
    batch: dict[str, Any] = {}
    with rich.progress.Progress(*columns, console=console.err()) as progress:
        bar = progress.add_task("validating", total=None)
        for batch in looks(lambda: _batch(client, batch_id), access.may_return, lambda: None):
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(bar, description=batch["status"], completed=done, total=counts["total"] or None)
            if batch["status"] in _ENDED:
                break
    return batch


def _print(batch: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.print_json(batch)
        return
    console.out().print(_table([batch]))
    for error in (batch["errors"] or {"data": []})["data"]:
        where = f"line {error['line']}: " if error["line"] else ""
        console.err().print(f"{where}{error['message']}", markup=False)


def _table(listed: list[dict[str, Any]]) -> ResultTable:
    columns, right = ("batch", "endpoint", "status", "ok", "failed", "of", "created"), ("ok", "failed", "of")
    table = ResultTable(*columns, right=right, whole=("batch",), is_narrow=True)
    for batch in listed:
        counts = batch["request_counts"]
        created = datetime.fromtimestamp(batch["created_at"]).strftime("%Y-%m-%d %H:%M")
        figures = (str(counts[name]) for name in ("completed", "failed", "total"))
        table.add_line(batch["id"], batch["endpoint"], batch["status"], *figures, created)
    return table

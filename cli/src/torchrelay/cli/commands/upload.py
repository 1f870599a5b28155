"""`torchrelay upload`: upload and publish a model folder, or a GGUF file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.progress
import typer
from rich.text import Text

from torchrelay.cli.api.access import (
    Access,
    EngineOption,
    HomeOption,
    IdleTimeoutOption,
    KeyOption,
    MaxInstancesOption,
    UrlOption,
    tenant_access,
)
from torchrelay.cli.api.client import given, near_name
from torchrelay.cli.api.model_check import check_folder, check_name
from torchrelay.cli.api.model_folder import has_chat_template, left_out
from torchrelay.cli.api.upload import ModelUpload, UploadJournal
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.views import console
from torchrelay.common.quantities import format_bytes

if TYPE_CHECKING:
    from torchrelay.cli.gguf.conversion import Conversion

EXAMPLE = "Example:  torchrelay upload ./Qwen3-0.6B --name qwen3\n\nThen:     torchrelay chat qwen3"
_STAGES = {
    "convert": "Converting",
    "hash": "Hashing",
    "upload": "Uploading",
    "wait": "Waiting",
    "validate": "Checking",
    "pack": "Packing",
    "publish": "Publishing",
}


class Quantization(StrEnum):
    INT8 = "int8"


class StageBars:
    """A progress bar per stage, in order of appearance."""

    def __init__(self, progress: rich.progress.Progress) -> None:
        self._progress = progress
        self._bars: dict[str, rich.progress.TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._bars:
            for bar in self._bars.values():
                self._progress.stop_task(bar)
            name = _STAGES.get(stage, stage.capitalize())
            # A resumed upload starts at what is already there, so that the rate is right.
            begin = done if stage == "upload" else 0
            self._bars[stage] = self._progress.add_task(name, total=max(total, 1), completed=begin)
        self._progress.update(self._bars[stage], completed=done, total=max(total, 1))


class RateColumn(rich.progress.TransferSpeedColumn):
    """Bytes per second; empty while unknown."""

    def render(self, task: rich.progress.Task) -> Text:
        return super().render(task) if task.finished_speed or task.speed else Text("")


def upload(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|GGUF", help="Hugging Face folder (config, tokenizer, safetensors), or a GGUF file."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the model; the folder's by default. With the admin key: TENANT/NAME.")
    ] = None,
    quantize: Annotated[
        Quantization | None,
        typer.Option(help="Publish the weights of linear layers in 8 bits: about half the memory and time to load."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The folder is a LoRA adapter of this model, as PEFT saves it.")
    ] = None,
    idle_timeout_s: IdleTimeoutOption = None,
    max_instances: MaxInstancesOption = None,
    engine: EngineOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Upload a model folder and publish it under a name.

    A GGUF file is converted on this machine first: weights in bf16, tokenizer and chat template. A LoRA adapter becomes
    a model of its own name with --base, and runs on the instances of its base.

    Run the same command again to resume an interrupted upload; `torchrelay uploads` lists and aborts those left open. A
    model that is refused ends its upload; what you send again within an hour is only what you changed. Uploading to an
    existing name publishes a new version; running requests finish on the old one.
    """
    access = tenant_access(home, url, key, name or "")
    settings = given(
        idle_timeout_s=idle_timeout_s, max_instances=max_instances, engine=engine, base=base, quantize=quantize
    )
    full_name = _model_name(access, source, name)
    check_name(full_name)
    if base is not None and quantize is not None:
        raise CliError("--quantize is for models; an adapter keeps its dtype", "leave one of --base and --quantize out")
    conversion = _conversion(source)
    needed = "" if quantize is None else "torchrelay"
    if conversion is None:
        needed = check_folder(source, is_adapter=base is not None, to_int8=quantize is not None, engine=engine or "")
    if needed and engine is not None and engine.partition(":")[0] not in ("auto", needed):
        raise CliError(f"the weights need the engine {needed}, not {engine}", f"use --engine {needed}, or none")
    before = _version_before(access, full_name)  # also checks the key, before minutes of conversion
    with _model_folder(source, conversion) as folder:
        model = _run(access, folder, full_name, settings, needed)
        own_notes = left_out(source, is_adapter=base is not None) if conversion is None else conversion.notes
        notes = own_notes + model.get("notes", [])
        may_chat = base is not None or has_chat_template(folder)
    kind = f"adapter of {model['parent']}" if model.get("parent") else f"{model['architecture']}, {model['dtype']}"
    facts = f"{kind}, {format_bytes(model['size_bytes'])}"
    what = "unchanged" if model["version"] == before else "published"
    console.out().print(f"[bold green]{what}[/] {model['id']}  [dim]({facts})[/]")
    for note in notes:
        console.err().print(Text(f"note: {note}"))
    if may_chat:
        console.err().print(f"[dim]next: torchrelay chat {model['id']}[/]")
    else:
        console.err().print("[dim]the model has no chat template: call /v1/completions or /v1/embeddings[/]")


def _conversion(source: Path) -> Conversion | None:
    """The conversion of a GGUF file; None: ``source`` is a folder. Raises ``CliError``, also if no space is left."""
    if source.suffix.lower() != ".gguf" or not source.is_file():
        return None
    from torchrelay.cli.gguf.conversion import plan_conversion  # NumPy takes a while to import

    conversion = plan_conversion(source)
    conversion.check_space(Path(tempfile.gettempdir()))
    return conversion


@contextmanager
def _model_folder(source: Path, conversion: Conversion | None) -> Iterator[Path]:
    """The folder to upload: ``source``, or a temporary one with what it is converted to."""
    if conversion is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="torchrelay-upload-") as name:
        folder = Path(name)
        with _progress_bars() as progress:
            conversion.write(folder, StageBars(progress))
        check_folder(folder)
        yield folder


def _version_before(access: Access, name: str) -> str | None:
    """The current version of the name. Raises ``CliError`` when this key cannot publish under it."""
    tenant, slash, _ = name.rpartition("/")
    with access.client() as client:
        if slash and access.is_admin:
            known = [entry["name"] for entry in client.call("GET", "/v1/tenants")["data"]]
            if tenant not in known:
                near = near_name(tenant, known)
                hint = f"; did you mean {near}?" if near else ""
                create = f"create it: torchrelay tenant create {tenant}"
                raise CliError(f"tenant {tenant!r} does not exist{hint}", create)
        elif slash:
            own = client.call("GET", "/v1/keys")["data"][0]["tenant"]  # includes the key used
            if tenant != own:
                raise CliError(f"this key is {own}'s, not {tenant}'s", f"pass --name {own}/..., or a key of {tenant}")
        try:
            version: str = client.call("GET", f"/v1/models/{name}")["version"]
        except ApiError as error:
            if error.status != 404:
                raise
            return None
    return version


def _progress_bars() -> rich.progress.Progress:
    columns = (
        rich.progress.TextColumn("{task.description:<10}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.DownloadColumn(),
        RateColumn(),
        rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    return rich.progress.Progress(*columns, console=console.err())


def _run(access: Access, folder: Path, name: str, settings: dict[str, Any], needed_engine: str) -> dict[str, Any]:
    try:
        with _progress_bars() as progress, access.client() as client:
            upload = ModelUpload(client, folder, name, StageBars(progress), UploadJournal.of_user())
            return upload.run(settings, needed_engine)
    except KeyboardInterrupt:
        raise CliError("interrupted", "nothing was sent yet") from None


def _model_name(access: Access, source: Path, name: str | None) -> str:
    path = source.resolve()
    chosen = name or (path.stem if path.suffix.lower() == ".gguf" else path.name).lower()
    if access.is_admin and "/" not in chosen:
        raise CliError(
            "with the admin key, the name must include the tenant",
            f"pass --name TENANT/{chosen}, or create a tenant's key: torchrelay key create --tenant NAME",
        )
    return chosen

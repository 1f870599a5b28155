"""`torchrelay upload`: upload and publish a model folder, a model of the hub, or a GGUF file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.progress
import typer
from rich.table import Column
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
from torchrelay.cli.api.model_check import check_model, check_name
from torchrelay.cli.api.model_files import has_chat_template, left_out
from torchrelay.cli.api.model_source import Folder, ModelSource
from torchrelay.cli.api.upload import ModelUpload, UploadJournal
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.gguf.header import MAX_HEADER_BYTES
from torchrelay.cli.hub.name import HubName, hub_name
from torchrelay.cli.views import console
from torchrelay.common.quantities import format_bytes

if TYPE_CHECKING:
    from torchrelay.cli.gguf.conversion import Conversion

_PATHS = {"generate": "/v1/completions", "embed": "/v1/embeddings", "score": "/v1/rerank"}  # by a model's task
EXAMPLE = """Example:  torchrelay upload Qwen/Qwen3-0.6B --name qwen3

Or:       torchrelay upload ./Qwen3-0.6B --name qwen3

Then:     torchrelay chat qwen3"""
_STAGES = {
    "convert": "Converting",
    "hash": "Hashing",
    "wait": "Waiting",
    "validate": "Checking",
    "pack": "Packing",
    "publish": "Publishing",
}


class Quantization(StrEnum):
    INT8 = "int8"


class ProgressLines:
    """A line for each stage and each file: those of files that are being sent move, and the lines before them stay as
    they ended.
    """

    def __init__(self, progress: rich.progress.Progress) -> None:
        self._progress = progress
        self._running: dict[str, rich.progress.TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._running:
            self._end(all_of=stage in _STAGES)
            # A resumed file starts at what is already there, so that the rate is right.
            begin = 0 if stage in _STAGES else done
            self._running[stage] = self._progress.add_task(
                _STAGES.get(stage, stage), total=max(total, 1), completed=begin
            )
        self._progress.update(self._running[stage], completed=done if total else 1, total=max(total, 1))

    def _end(self, *, all_of: bool) -> None:
        """Ends the lines of stages and of complete files, or all."""
        for stage, task_id in list(self._running.items()):
            task = next(task for task in self._progress.tasks if task.id == task_id)
            if all_of or stage in _STAGES or task.finished:
                self._progress.stop_task(task_id)
                self._progress.console.print(self._progress.make_tasks_table([task]))
                self._progress.remove_task(task_id)
                del self._running[stage]


class RateColumn(rich.progress.TransferSpeedColumn):
    """Bytes per second; empty while unknown."""

    def render(self, task: rich.progress.Task) -> Text:
        return super().render(task) if task.finished_speed or task.speed else Text("")


def upload(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|GGUF|OWNER/NAME",
            help="Hugging Face folder (config, tokenizer, safetensors), GGUF file, or name on the Hugging Face hub.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the model; the source's by default. With the admin key: TENANT/NAME.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model of the hub; its default branch by default.")
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
    """Upload a model and publish it under a name.

    What exists here is a folder or a file; otherwise OWNER/NAME is a model of the Hugging Face hub, which this machine
    reads at one commit and sends on as it arrives, and OWNER/NAME:Q4_K_M its GGUF file of that quantization. The token
    is that of `hf auth login` or HF_TOKEN; HF_ENDPOINT names a mirror, which then gets the token. hf:// in front always
    means the hub, and ./ a path.

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
    hub = hub_name(source, revision)
    path = Path(source)
    full_name = _model_name(access, path, hub, name)
    check_name(full_name)
    if base is not None and quantize is not None:
        raise CliError("--quantize is for models; an adapter keeps its dtype", "leave one of --base and --quantize out")
    files, gguf = _opened(path, hub)
    conversion, needed = None, "" if quantize is None else "torchrelay"
    if not gguf:
        needed = check_model(files, is_adapter=base is not None, to_int8=quantize is not None, engine=engine or "")
    elif hub is None:
        conversion = _conversion(path)
    if needed and engine is not None and engine.partition(":")[0] not in ("auto", needed):
        raise CliError(f"the weights need the engine {needed}, not {engine}", f"use --engine {needed}, or none")
    if needed and needed != "torchrelay" and engine is None:
        console.err().print(Text(f"note: only the engine {needed} computes this model; a worker must have it"))
    before = _version_before(access, full_name)  # also checks the key, before minutes of download and conversion
    with ExitStack() as stack:
        if gguf and conversion is None:
            check = partial(_conversion, num_bytes=files.sizes[gguf])
            with _progress() as progress:
                lines = ProgressLines(progress)
                copy = stack.enter_context(files.local_file(gguf, lines, check, MAX_HEADER_BYTES))
            conversion = _conversion(copy)
        ready = files if conversion is None else stack.enter_context(_converted(conversion))
        model = _run(access, ready, full_name, settings, needed)
        own_notes = left_out(files, is_adapter=base is not None) if conversion is None else conversion.notes
        notes = own_notes + model.get("notes", [])
        may_chat = base is not None or has_chat_template(ready)
    kind = f"adapter of {model['parent']}" if model.get("parent") else f"{model['architecture']}, {model['dtype']}"
    facts = f"{kind}, {format_bytes(model['size_bytes'])}"
    what = "unchanged" if model["version"] == before else "published"
    console.out().print(f"[bold green]{what}[/] {model['id']}  [dim]({facts})[/]")
    for note in notes:
        console.err().print(Text(f"note: {note}"))
    if may_chat:
        console.err().print(f"[dim]next: torchrelay chat {model['id']}[/]")
    else:
        calls = " or ".join(_PATHS[task] for task in model.get("tasks", ["generate"]))
        console.err().print(f"[dim]the model has no chat template: call {calls}[/]")


def _opened(source: Path, hub: HubName | None) -> tuple[ModelSource, str]:
    """The source of the files, and the GGUF file in it that is to be converted, or ""."""
    if hub is None:
        is_gguf = source.suffix.lower() == ".gguf" and source.is_file()
        return (Folder(source.parent), source.name) if is_gguf else (Folder(source), "")
    from torchrelay.cli.hub.repository import HubRepository  # huggingface_hub takes a while to import

    repository = HubRepository(hub)
    console.err().print(Text(f"{repository} at commit {repository.commit}"))
    return repository, repository.gguf_file(hub.quantization) if hub.quantization else ""


def _conversion(gguf: Path, num_bytes: int | None = None) -> Conversion:
    """The conversion of a GGUF file, which may lack its end if ``num_bytes``, its whole size, is given. Raises
    ``CliError``, also if no space is left.
    """
    from torchrelay.cli.gguf.conversion import plan_conversion  # NumPy takes a while to import

    conversion = plan_conversion(gguf, num_bytes)
    conversion.check_space(Path(tempfile.gettempdir()))
    return conversion


@contextmanager
def _converted(conversion: Conversion) -> Iterator[Folder]:
    """A temporary folder with what a GGUF file is converted to."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-upload-") as name:
        with _progress() as progress:
            conversion.write(Path(name), ProgressLines(progress))
        folder = Folder(Path(name))
        check_model(folder)
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


def _progress() -> rich.progress.Progress:
    name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False, table_column=name),
        rich.progress.BarColumn(16),
        rich.progress.DownloadColumn(table_column=Column(min_width=15, justify="right")),
        RateColumn(Column(min_width=10, justify="right")),
        rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    output = console.err()
    return rich.progress.Progress(*columns, console=output, expand=output.is_terminal)


def _run(access: Access, files: ModelSource, name: str, settings: dict[str, Any], needed_engine: str) -> dict[str, Any]:
    try:
        with _progress() as progress, access.client() as client:
            upload = ModelUpload(client, files, name, ProgressLines(progress), UploadJournal.of_user())
            return upload.run(settings, needed_engine)
    except KeyboardInterrupt:
        raise CliError("interrupted", "nothing was sent yet") from None


def _model_name(access: Access, source: Path, hub: HubName | None, name: str | None) -> str:
    path = source.resolve() if hub is None else Path(hub.repo)
    chosen = name or (path.stem if path.suffix.lower() == ".gguf" and hub is None else path.name).lower()
    if access.is_admin and "/" not in chosen:
        raise CliError(
            "with the admin key, the name must include the tenant",
            f"pass --name TENANT/{chosen}, or create a tenant's key: torchrelay key create --tenant NAME",
        )
    return chosen

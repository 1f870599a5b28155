"""The files of a Hugging Face folder that make up a model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.cli.left_out import left_out_note

READ_BYTES = 1 << 20
ProgressCallback = Callable[[str, int, int], None]  # stage, done, total

_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_TOOL_TEMPLATE = f"{_TEMPLATES}/tool_use.jinja"
_DOCUMENTS = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        _TEMPLATE,
        "vocab.json",
        "merges.txt",
        "model.safetensors.index.json",
        "modules.json",
    }
)
_POOLING = "1_Pooling/config.json"  # beside modules.json: how texts are embedded
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PART = re.compile(r"(.+\.gguf)[.-].+", re.IGNORECASE)  # as "split" names parts
_NEED_FOLDER = "give the folder of a Hugging Face model"


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of a model folder, as declared to the gateway."""

    path: str
    size: int
    sha256: str


def _weights(folder: Path, present: set[str]) -> set[str]:
    """The files with weights: those that the index names, or else the single one. Raises ``CliError``."""
    if _INDEX not in present:
        return {_SINGLE} & present
    try:
        names = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        missing = sorted(names - present)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CliError(f"{folder / _INDEX} is not an index of weights", "copy it again from its source") from error
    if missing and _SINGLE in present and not names & present:
        return {_SINGLE}  # into which the shards that the index names were merged
    if missing:
        raise CliError(f"{folder} has no {missing[0]}, which {_INDEX} names", "download it again")
    return names


def model_files(folder: Path, progress: ProgressCallback, *, is_adapter: bool = False) -> list[LocalFile]:
    """The files of the model, or of the adapter, with their digests. Raises ``CliError`` when the folder is none."""
    paths = adapter_paths(folder) if is_adapter else model_paths(folder)
    total, done = sum(path.stat().st_size for path in paths), 0
    files = []
    for path in paths:
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
                size += len(block)
                done += len(block)
                progress("hash", done, total)
        files.append(LocalFile(path.relative_to(folder).as_posix(), size, digest.hexdigest()))
    return files


def adapter_paths(folder: Path) -> list[Path]:
    """The files of a LoRA adapter, as PEFT saves it. Raises ``CliError`` when the folder is not an adapter."""
    _check_is_folder(folder)
    paths = [folder / name for name in _ADAPTER]
    if missing := next((path for path in paths if not path.is_file()), None):
        raise CliError(f"{folder} has no {missing.name}", "give the folder of a LoRA adapter, or leave out --base")
    return paths


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        if folder.exists() and (part := _PART.fullmatch(folder.name)):
            hint = f"join all its parts in their order, cat FIRST NEXT ... > {part[1]}, and upload {part[1]}"
            raise CliError(f"{folder} is a part of the GGUF file {part[1]}", hint)
        if folder.exists():
            raise CliError(f"{folder} is not a folder", _NEED_FOLDER)
        name = str(folder)
        is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
        hint = f"; to download a model first: hf download {name} --local-dir DIR" if is_hub_name else ""
        raise CliError(f"{folder} does not exist", _NEED_FOLDER + hint)


def model_paths(folder: Path) -> list[Path]:
    """The model's files by name. Raises ``CliError`` when the folder is not a model."""
    _check_is_folder(folder)
    present = sorted(path for path in folder.iterdir() if path.is_file())
    names = {path.name for path in present}
    if "config.json" not in names and _ADAPTER[0] in names:
        raise CliError(f"{folder} is a LoRA adapter", "name the model that it adapts: --base NAME")
    if "config.json" not in names:
        raise CliError(f"{folder} has no config.json", _folder_beneath(folder))
    if "tokenizer.json" not in names:
        raise CliError(
            f"{folder} has no tokenizer.json",
            "save a fast tokenizer into it: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)",
        )
    weights = _weights(folder, names)
    if not weights:
        raise CliError(
            f"{folder} has no safetensors weights (model.safetensors, or shards with {_INDEX})",
            "save the model as safetensors: model.save_pretrained(FOLDER, safe_serialization=True)",
        )
    files = [path for path in present if path.name in _DOCUMENTS | weights]
    if "modules.json" in names and (folder / _POOLING).is_file():
        files.append(folder / _POOLING)
    if (folder / _TOOL_TEMPLATE).is_file():
        files.append(folder / _TOOL_TEMPLATE)
    return files


def left_out(folder: Path, *, is_adapter: bool) -> list[str]:
    """A sentence for each group of files of the folder that are not sent although other programs use them."""
    templates = [path.relative_to(folder).as_posix() for path in sorted((folder / _TEMPLATES).glob("*.jinja"))]
    if is_adapter:
        names = [name for name in ("tokenizer.json", "tokenizer_config.json", _TEMPLATE) if (folder / name).is_file()]
        return left_out_note(names + templates, "an adapter has the tokenizer and the chat template of its base")
    return left_out_note([name for name in templates if name != _TOOL_TEMPLATE])


def has_chat_template(folder: Path) -> bool:
    """Whether the model of the folder has a chat template, in any of the files that may carry it."""
    if (folder / _TEMPLATE).is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _folder_beneath(folder: Path) -> str:
    """A hint at the one GGUF file, or at the one folder with a config, at most two levels down as in the cache of
    Hugging Face.
    """
    files = list(folder.glob("*.gguf"))
    if len(files) == 1:
        return f"upload the GGUF file: torchrelay upload {files[0]} --name NAME"
    folders = [path.parent for pattern in ("*/config.json", "*/*/config.json") for path in folder.glob(pattern)]
    return f"{folders[0]} has one: torchrelay upload {folders[0]} --name NAME" if len(folders) == 1 else _NEED_FOLDER

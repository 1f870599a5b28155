"""``python -m torchrelay.param_store.packer``: reads a job from standard input, writes JSON lines to standard output.

    in   {"folder", "pack_path", "largest_slot_bytes", "memory_bytes", "base_config", "base_dtype",
          "base_is_opaque", "engines", "quantize"}    quantize: "int8", or empty
    out  {"stage", "done", "total"} ...   then one of the following; stage "validate" also has "notes", sentences about
                                         what is converted or left out
         {"packed": {"pack_id"}}                 the manifest has the pack's path with the suffix .manifest; files that
                                                 replace those of the upload lie beside the pack
         {"checked": {"num_matrices"}}           an adapter of base_config, of which nothing is written
         {"refused": {"file", "detail"}}         the upload is invalid; with the file "quantize" the commit is
         {"failed": {"errno", "detail"}}         the machine is at fault, such as a full disk

The exit status is 0 in all cases.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrelay.modelspec.config import ModelConfig, declared_dtype, read_config
from torchrelay.modelspec.opaque import OpaqueModel, pooled_document
from torchrelay.param_store.model_files import CONFIG
from torchrelay.param_store.packer.adapter import check_adapter
from torchrelay.param_store.packer.checkpoint import Checkpoint, read_checkpoint
from torchrelay.param_store.packer.core import PackPlan, PackRefused
from torchrelay.param_store.packer.documents import (
    check_embedding,
    check_engine,
    check_eos,
    check_other_documents,
    check_tokenizer,
    gives_token_types,
    read_model_config,
)
from torchrelay.param_store.packer.embedding_checkpoint import served_tensors, without_missing_head
from torchrelay.param_store.packer.int8_weights import int8_config, quantized_to_int8
from torchrelay.param_store.packer.opaque_plan import plan_opaque
from torchrelay.param_store.packer.pack_plan import plan_pack, tensors_of_text
from torchrelay.param_store.packer.pack_writer import write_pack
from torchrelay.param_store.packer.packed_int8 import unpacked_int8
from torchrelay.transfer.manifest import pack_id_of

_PROGRESS_BYTES = 16 << 20


def emit(**line: Any) -> None:
    """Writes a line to the store. If the store is gone, the broken pipe ends this process."""
    print(json.dumps(line), flush=True)


def pack(
    folder: Path, pack_path: Path, largest_slot_bytes: int, engines: Sequence[str] = (), quantize: str = ""
) -> dict[str, Any]:
    """Validates ``folder`` and writes the pack and its manifest. ``engines`` are those that may compute the model;
    none: they are not known. With ``quantize`` linear layers get weights in int8. Raises ``PackRefused``.
    """
    document, model = read_model_config(folder, engines)
    if quantize:
        document, model = int8_config(document, model)
    check_engine(model, engines, is_quantized_here=bool(quantize))
    check_eos(folder, document, model.vocab_size)
    embedding = check_embedding(folder, model)
    document_notes = check_other_documents(folder)
    completed_files = check_tokenizer(folder, model.vocab_size)
    if quantize:
        completed_files[CONFIG] = json.dumps(document).encode()
    checkpoint = read_checkpoint(folder)
    if isinstance(model, OpaqueModel):
        plan = plan_opaque(model, document, checkpoint, declared_dtype(document), embeds=embedding is not None)
        is_typed = not model.is_reranker or gives_token_types(folder)
        document = pooled_document(document, "" if embedding is None else embedding.pooling_name, is_typed=is_typed)
    else:
        document, plan = _plan(document, model, checkpoint, embedding is not None, quantize)
    num_bytes = plan.layout.num_bytes
    if largest_slot_bytes and num_bytes > largest_slot_bytes:
        detail = f"the weights need {num_bytes:,} bytes and the largest slot has {largest_slot_bytes:,} available"
        raise PackRefused(plan.sources[0].file, detail)
    emit(stage="validate", done=num_bytes, total=num_bytes, notes=(*plan.notes, *document_notes))

    num_reported = 0

    def on_progress(done: int) -> None:
        nonlocal num_reported
        if done - num_reported >= _PROGRESS_BYTES or done == num_bytes:
            num_reported = done
            emit(stage="pack", done=done, total=num_bytes)

    chunk_bytes, digests = write_pack(plan, folder, pack_path, on_progress)
    encoded = plan.layout.manifest(document, chunk_bytes, digests, is_opaque=isinstance(model, OpaqueModel)).encode()
    pack_path.with_suffix(".manifest").write_bytes(encoded)
    for name, content in completed_files.items():
        pack_path.with_name(name).write_bytes(content)
    return {"pack_id": pack_id_of(encoded)}


def _plan(
    document: dict[str, Any], config: ModelConfig, checkpoint: Checkpoint, embeds: bool, quantize: str
) -> tuple[dict[str, Any], PackPlan]:
    """config.json as it describes the tensors, and the plan of a pack in execution order."""
    tensors = unpacked_int8(config, tensors_of_text(document, checkpoint.tensors))
    if embeds:
        tensors = served_tensors(config, tensors)
        document = without_missing_head(document, config, tensors)
        config = read_config(document)
    if quantize:
        tensors = quantized_to_int8(config, tensors)
    return document, plan_pack(config, replace(checkpoint, tensors=tensors), declared_dtype(document))


def main() -> None:
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (job["memory_bytes"], job["memory_bytes"]))
    try:
        if job["base_config"] is not None:
            num_matrices = check_adapter(
                Path(job["folder"]), job["base_config"], job["base_dtype"], is_opaque=job.get("base_is_opaque", False)
            )
            emit(checked={"num_matrices": num_matrices})
        else:
            folder, pack_path = Path(job["folder"]), Path(job["pack_path"])
            emit(packed=pack(folder, pack_path, job["largest_slot_bytes"], job["engines"], job["quantize"]))
    except PackRefused as refused:
        emit(refused={"file": refused.file, "detail": refused.detail})
    except MemoryError:
        emit(refused={"file": "", "detail": "the upload's documents need more memory than the packer may use"})
    except OSError as error:
        emit(failed={"errno": error.errno, "detail": str(error)})


if __name__ == "__main__":
    main()

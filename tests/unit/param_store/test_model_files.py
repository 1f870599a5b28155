"""What the files of a model declare: the tokens that end an answer, and embeddings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import declare_embeddings
from tests.unit.param_store.model_folders import Tensors, config_of, pack_refusal, tensors_of, write_folder
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.param_store.embedding import EmbeddingSpec, UnsupportedEmbedding, declared_embedding
from torchrelay.param_store.grpc.messages import version_description
from torchrelay.param_store.model_files import eos_token_ids
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.remote.folder_store import FolderStore
from torchrelay.param_store.remote.versions import Versions

ADDED = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "</s>"}], "model": {"vocab": {}}}


def tokens(generation: Any = None, config: Any = None, tokenizer_config: Any = None, tokenizer: Any = ADDED) -> Any:
    files = {
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": tokenizer,
    }
    encoded = {name: json.dumps(document).encode() for name, document in files.items() if document is not None}
    return eos_token_ids(encoded.get, config or {})


def test_all_three_files_count_each_token_once() -> None:
    eos = {"eos_token": "<|im_end|>"}
    assert tokens({"eos_token_id": [2, 5]}, {"eos_token_id": 3}, eos) == [2, 5, 3, 7]
    assert tokens({"eos_token_id": [7, 2]}, {"eos_token_id": 2}, eos) == [7, 2]
    assert tokens(None, {"eos_token_id": 2}) == [2]
    assert tokens() == []
    assert tokens({"eos_token_id": 2}, {"eos_token_id": [9, -1, "x", 4], "vocab_size": 8}, eos) == [2, 4, 7]
    assert tokens(None, {"eos_token_id": 2, "vocab_size": 7}, eos) == [2], "the model never gives it"


@pytest.mark.parametrize("form", ["</s>", {"content": "</s>", "lstrip": False}])
def test_tokenizers_own_token_is_found_in_either_file(form: Any) -> None:
    assert tokens(tokenizer_config={"eos_token": form}) == [8]
    declared = {"eos_token": form, "added_tokens_decoder": {"4": {"content": "</s>"}, "x": 1}}
    assert tokens(tokenizer_config=declared) == [4]
    assert tokens(tokenizer_config={"eos_token": "<none>"}) == tokens(tokenizer_config={"eos_token": None}) == []


@pytest.mark.parametrize("broken", [[], "text", {"added_tokens": [1]}, {"added_tokens": None}])
def test_broken_documents_name_no_token(broken: Any) -> None:
    assert tokens(tokenizer_config={"eos_token": "</s>"}, tokenizer=broken) == []
    assert eos_token_ids({"tokenizer_config.json": b"{", "generation_config.json": b"[" * 99_999}.get, {}) == []


TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LAST_TOKEN = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
MODULES_FILE, POOLING_FILE = "modules.json", "1_Pooling/config.json"


def declared(modules: Any, pooling: Any = LAST_TOKEN, *, is_encoder: bool | None = False) -> EmbeddingSpec | None:
    files = {MODULES_FILE: modules, POOLING_FILE: pooling}
    return declared_embedding(
        {name: json.dumps(content).encode() for name, content in files.items() if content is not None}.get,
        64,
        is_encoder,
    )


def test_last_token_with_and_without_normalization() -> None:
    assert declared([TRANSFORMER, POOLING, NORMALIZE]) == EmbeddingSpec(types_pb2.POOLING_LAST_TOKEN, 64, True)
    assert declared([TRANSFORMER, POOLING]) == EmbeddingSpec(types_pb2.POOLING_LAST_TOKEN, 64, False)
    assert declared(None) is None, "a pooling alone declares nothing"


def test_poolings_of_encoders() -> None:
    mean = {**LAST_TOKEN, "pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
    first = {**LAST_TOKEN, "pooling_mode_lasttoken": False, "pooling_mode_cls_token": True}
    normalized = [TRANSFORMER, POOLING, NORMALIZE]
    assert declared(normalized, mean, is_encoder=True) == EmbeddingSpec(types_pb2.POOLING_MEAN, 64, True)
    assert declared(normalized, first, is_encoder=True) == EmbeddingSpec(types_pb2.POOLING_FIRST_TOKEN, 64, True)
    assert declared(None, is_encoder=True) == EmbeddingSpec(types_pb2.POOLING_MEAN, 64, False)
    with pytest.raises(UnsupportedEmbedding, match=r"of an encoder must be .*mean_tokens or .*cls_token, not .*last"):
        declared(normalized, LAST_TOKEN, is_encoder=True)
    with pytest.raises(UnsupportedEmbedding, match="of a decoder must be pooling_mode_lasttoken"):
        declared(normalized, mean)
    for given, pooling in ((mean, "MEAN"), (first, "FIRST_TOKEN"), (LAST_TOKEN, "LAST_TOKEN")):
        spec = declared(normalized, given, is_encoder=None)
        assert spec == EmbeddingSpec(types_pb2.Pooling.Value(f"POOLING_{pooling}"), 64, True)
    assert declared(None, is_encoder=None) is None


@pytest.mark.parametrize(
    ("modules", "pooling", "file", "said"),
    [
        ([TRANSFORMER], LAST_TOKEN, MODULES_FILE, "must be Transformer, Pooling and perhaps Normalize"),
        ([], LAST_TOKEN, MODULES_FILE, "not none"),
        ([TRANSFORMER, POOLING, {"type": "x.Dense"}, NORMALIZE], LAST_TOKEN, MODULES_FILE, "x.Dense"),
        ([{**TRANSFORMER, "type": "custom.Transformer"}, POOLING], LAST_TOKEN, MODULES_FILE, "custom.Transformer"),
        ([TRANSFORMER, {**POOLING, "path": "pool"}], LAST_TOKEN, MODULES_FILE, "path of Pooling must be '1_Pooling'"),
        ({"a": 1}, LAST_TOKEN, MODULES_FILE, "it is not valid"),
        ([1], LAST_TOKEN, MODULES_FILE, "it is not valid"),
        ([TRANSFORMER, POOLING], None, POOLING_FILE, "it is missing from the upload"),
        ([TRANSFORMER, POOLING], [], POOLING_FILE, "it is not valid"),
        ([TRANSFORMER, POOLING], {"word_embedding_dimension": 64}, POOLING_FILE, "not none"),
        (
            [TRANSFORMER, POOLING],
            {**LAST_TOKEN, "pooling_mode_mean_tokens": True},
            POOLING_FILE,
            "not pooling_mode_lasttoken, pooling_mode_mean_tokens",
        ),
        (
            [TRANSFORMER, POOLING],
            {**LAST_TOKEN, "word_embedding_dimension": 32},
            POOLING_FILE,
            "word_embedding_dimension is 32, and hidden_size in config.json 64",
        ),
    ],
)
def test_other_embeddings_are_refused_by_file(modules: Any, pooling: Any, file: str, said: str) -> None:
    with pytest.raises(UnsupportedEmbedding) as refused:
        declared(modules, pooling)
    assert refused.value.file == file and said in refused.value.detail


@pytest.mark.parametrize("encoded", [b"[" * 100_000, b"\xff", b'[{"type":"a","x":' + b"[" * 50_000])
def test_broken_documents_are_refused(encoded: bytes) -> None:
    with pytest.raises(UnsupportedEmbedding):
        declared_embedding({MODULES_FILE: encoded}.get, 64, False)


def test_packer_refuses_what_is_not_supported(tmp_path: Path) -> None:
    folder = declare_embeddings(write_folder(tmp_path / "model"), mode="mean_tokens")
    refused = "the pooling of a decoder must be pooling_mode_lasttoken, not pooling_mode_mean_tokens"
    assert str(pack_refusal(folder)) == f"{POOLING_FILE}: {refused}"
    declare_embeddings(folder)
    pack(folder, tmp_path / "a.pack", 0)


def published(folder: Path) -> pb.VersionDescription:
    """Packs the folder and publishes it with its documents, as a store does after an upload."""
    pack(folder, folder.with_suffix(".pack"), 0)
    documents = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    files = {path.relative_to(folder).as_posix(): path for path in documents}
    versions = Versions(FolderStore(folder.with_name("remote")))
    return version_description(versions.publish(folder.with_suffix(".pack"), files))


def test_published_version_has_the_embedding(tmp_path: Path) -> None:
    version = published(declare_embeddings(write_folder(tmp_path / "model")))
    assert (version.embedding.pooling, version.embedding.num_dimensions) == (types_pb2.POOLING_LAST_TOKEN, 64)
    assert version.embedding.is_normalized and {MODULES_FILE, POOLING_FILE} <= set(version.file_digests)
    plain = published(write_folder(tmp_path / "plain"))
    assert not plain.HasField("embedding") and plain.pack_id == version.pack_id


def saved_without_head(folder: Path, architecture: str = "Qwen3ForCausalLM", *, tied: bool = False) -> Path:
    """A folder whose tensors have no prefix and whose head is missing, as of Qwen3-Embedding."""
    config = config_of("Qwen3ForCausalLM", tie_word_embeddings=tied)
    tensors = tensors_of(config).by_name
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    write_folder(folder, config)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    Tensors(named).write(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("architecture", "tied", "has_head"),
    [("Qwen3ForCausalLM", True, True), ("Qwen3ForCausalLM", False, False), ("Qwen3Model", False, False)],
)
def test_checkpoint_saved_without_its_head(tmp_path: Path, architecture: str, tied: bool, has_head: bool) -> None:
    version = published(declare_embeddings(saved_without_head(tmp_path / "model", architecture, tied=tied)))
    assert (version.HasField("embedding"), version.has_no_head) == (True, not has_head)
    assert version.architecture == ("Qwen3ForCausalLM" if has_head else "Qwen3Model")


def encoder_tensors(config: dict[str, Any]) -> Tensors:
    """With the tensors that checkpoints have beside those that are served."""
    tensors = tensors_of(config)
    tensors.by_name["embeddings.position_ids"] = ("I64", (1, 512), bytes(8 * 512))
    tensors.add("pooler.dense.weight", "F32", (64, 64), random.Random(0))
    tensors.add("pooler.dense.bias", "F32", (64,), random.Random(0))
    return tensors


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "XLMRobertaModel"])
def test_published_encoder(tmp_path: Path, name: str) -> None:
    config = config_of(name)
    folder = write_folder(tmp_path / "model", config)
    encoder_tensors(config).write(folder / "model.safetensors")
    version = published(folder)
    assert (version.architecture, version.has_no_head) == (name, True)
    assert version.embedding.pooling == types_pb2.POOLING_MEAN and not version.embedding.is_normalized
    version = published(declare_embeddings(folder, mode="cls_token"))
    assert version.embedding.pooling == types_pb2.POOLING_FIRST_TOKEN and version.embedding.is_normalized
    assert version.shape.max_context_tokens == (512 if name == "BertModel" else 510)


def test_encoder_with_the_head_of_its_pretraining(tmp_path: Path) -> None:
    """The pack is that of the encoder alone."""
    for number, (name, prefix) in enumerate([("XLMRobertaModel", ""), ("XLMRobertaForMaskedLM", "roberta.")]):
        folder = write_folder(tmp_path / name, config_of(name))
        tensors = encoder_tensors(config_of(name)).by_name
        named = {prefix + key: tensor for key, tensor in tensors.items()}
        if prefix:
            named["lm_head.bias"] = ("F32", (96,), bytes(4 * 96))
        Tensors(named).write(folder / "model.safetensors")
        pack(folder, tmp_path / f"{number}.pack", 0)
    assert (tmp_path / "0.pack").read_bytes() == (tmp_path / "1.pack").read_bytes()
    assert (tmp_path / "0.manifest").read_bytes() == (tmp_path / "1.manifest").read_bytes()


def test_faulty_encoders_are_refused_by_file(tmp_path: Path) -> None:
    def refusal(changes: dict[str, tuple[int, ...] | None], **config: Any) -> tuple[str, str]:
        tensors = encoder_tensors(config_of("BertModel"))
        for tensor, shape in changes.items():
            tensors.by_name.pop(tensor, None)
            if shape is not None:
                tensors.add(tensor, "F32", shape, random.Random(0))
        folder = write_folder(tmp_path / "model", config_of("BertModel"))
        (folder / "config.json").write_text(json.dumps(config_of("BertModel", **config)))
        tensors.write(folder / "model.safetensors")
        refused = pack_refusal(folder)
        return refused.file, refused.detail

    weights, norm = "model.safetensors", "encoder.layer.1.output.LayerNorm.bias"
    assert refusal({norm: None}) == (weights, f"tensor '{norm}' is missing; config.json requires shape (64,)")
    file, detail = refusal({}, max_position_embeddings=514)
    assert file == weights and "embeddings.position_embeddings.weight" in detail and "(514, 64)" in detail
    file, detail = refusal({"encoder.layer.1.adapter.weight": (96,)})
    assert file == weights and "'encoder.layer.1.adapter.weight' is not part of BertModel" in detail
    assert refusal({}, position_embedding_type="relative_key")[0] == "config.json"
    declare_embeddings(tmp_path / "model", mode="max_tokens")
    assert refusal({}) == (
        POOLING_FILE,
        "the pooling of an encoder must be pooling_mode_mean_tokens or pooling_mode_cls_token, not"
        " pooling_mode_max_tokens",
    )
    declare_embeddings(tmp_path / "model", 32, mode="mean_tokens")
    assert refusal({})[0] == POOLING_FILE


def test_headless_model_must_declare_embeddings(tmp_path: Path) -> None:
    refused = pack_refusal(saved_without_head(tmp_path / "model", "Qwen3Model"))
    assert "Qwen3Model has no head for tokens, and no modules" in refused.detail
    assert "embed_tokens" in pack_refusal(saved_without_head(tmp_path / "other")).detail

"""Packs of architectures that vLLM alone computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import declare_embeddings, make_checkpoint, make_encoder
from tests.unit.param_store.test_model_files import published
from torchrelay.control.v1 import types_pb2
from torchrelay.modelspec.opaque import (
    MAX_CONTEXT_TOKENS,
    num_token_types,
    read_opaque,
    served_document,
    takes_token_types,
)
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.packer.core import PackRefused
from torchrelay.transfer.manifest import Manifest, decode_manifest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("glm4"), "glm4")


def changed(folder: Path, target: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A copy with other tensors, and keys of config.json; None removes a key."""
    target.mkdir()
    for path in filter(Path.is_file, folder.iterdir()):
        (target / path.name).write_bytes(path.read_bytes())
    document = json.loads((folder / "config.json").read_text()) | config
    document = {key: value for key, value in document.items() if value is not None}
    (target / "config.json").write_text(json.dumps(document))
    if tensors is not None:
        save_file(load_file(folder / "model.safetensors") | tensors, target / "model.safetensors", {"format": "pt"})
    return target


def packed(folder: Path, *engines: str) -> tuple[Manifest, bytes]:
    path = folder.with_suffix(".pack")
    pack(folder, path, 0, engines)
    return decode_manifest(path.with_suffix(".manifest").read_bytes()), path.read_bytes()


def test_every_tensor_is_packed_as_it_is_in_the_order_of_the_file(tmp_path: Path, checkpoint: Path) -> None:
    mask = {"model.mask": torch.ones(2, dtype=torch.int64)}
    manifest, data = packed(changed(checkpoint, tmp_path / "model", mask), "vllm", "torchrelay")
    stored = load_file(checkpoint / "model.safetensors")
    assert {entry.name for entry in manifest.tensors} == set(stored)
    for entry in manifest.tensors:
        raw = stored[entry.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (entry.shape, data[entry.offset : entry.offset + entry.num_bytes]) == (stored[entry.name].shape, raw)
    assert manifest.is_opaque and manifest.dtype == "F32"
    assert len(manifest.segments) == manifest.config["num_hidden_layers"] + 2
    shares = [segment.end - segment.begin for segment in manifest.segments]
    assert sum(shares) <= manifest.num_bytes and all(shares)


def refusal(folder: Path, *engines: str) -> str:
    with pytest.raises(PackRefused) as refused:
        packed(folder, *engines)
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "detail"),
    [
        ({"architectures": ["Glm4ForCausalLN"]}, "architectures: architecture 'Glm4ForCausalLN' is not known, to "),
        ({"architectures": ["Glm4ForCausalLN"]}, "; the nearest that it knows is Glm4ForCausalLM"),
        ({"architectures": ["Glm4vForConditionalGeneration"]}, "takes more than text, and vLLM 0.32"),
        ({"architectures": ["Idefics3ForConditionalGeneration"]}, "text_config: text_config must be an object"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: num_hidden_layers must be a whole number from 1 to 4,096"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: max_position_embeddings must be a whole number"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}},
         "quantization_config.quant_method: of an architecture that only vLLM computes, weights may be quantized by"),
    ],
)  # fmt: skip
def test_configs_are_refused_by_field(tmp_path: Path, checkpoint: Path, config: dict[str, Any], detail: str) -> None:
    assert detail in refusal(changed(checkpoint, tmp_path / "model", **config), "vllm")


def test_tensors_are_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    named = changed(checkpoint, tmp_path / "named", {"a tensor": torch.ones(1)})
    assert "tensor 'a tensor': its name is not 1 to 256 letters" in refusal(named, "vllm")
    infinite = changed(checkpoint, tmp_path / "infinite", {"model.norm.weight": torch.full((64,), torch.inf)})
    assert "tensor 'model.norm.weight': element 0 is infinite" in refusal(infinite, "vllm")


def test_the_own_engines_refusal_is_said_unless_vllm_may_compute_the_model(tmp_path: Path, checkpoint: Path) -> None:
    text = (
        "only the engine vllm computes Glm4ForCausalLM, and this model may run with torchrelay; upload the model with "
    )
    assert refusal(checkpoint, "torchrelay") == f"config.json: architectures: {text}the engine vllm"
    assert packed(checkpoint)[0].is_opaque  # which engines there are is not known
    llama = changed(make_checkpoint(tmp_path / "llama", "llama"), tmp_path / "relu", hidden_act="relu")
    assert refusal(llama).startswith("config.json: hidden_act: hidden_act 'relu' is not supported")
    assert packed(llama, "vllm")[0].is_opaque


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("cls_token", "first_token")])
def test_an_embedder_has_the_pooling_that_its_files_declare(tmp_path: Path, mode: str, pooling: str) -> None:
    folder = make_encoder(tmp_path / "model", "ModernBertModel")
    missing = "architectures: ModernBertModel has no head for tokens, and no modules.json declares embeddings"
    assert refusal(folder, "vllm") == f"config.json: {missing}"
    declare_embeddings(folder, mode=mode)
    config = packed(folder)[0].config
    assert config["torchrelay_pooling"] == pooling and "torchrelay_pooling" not in served_document(config)
    version = published(folder)
    assert (version.engine, version.has_no_head, version.embedding.num_dimensions) == ("vllm", True, 64)
    assert types_pb2.Pooling.Name(version.embedding.pooling) == f"POOLING_{pooling.upper()}"


def test_a_decoder_with_declared_embeddings_gives_these_alone(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(checkpoint, tmp_path / "model", torchrelay_pooling="mean")
    assert "torchrelay_pooling" not in packed(folder)[0].config and not published(folder).has_no_head
    capsys.readouterr()
    version = published(declare_embeddings(folder))
    assert "the model gives these alone: vLLM computes either them or tokens" in capsys.readouterr().out
    assert (version.has_no_head, version.embedding.pooling) == (True, types_pb2.POOLING_LAST_TOKEN)
    assert "the pooling of a decoder must be pooling_mode_lasttoken" in refusal(
        declare_embeddings(folder, mode="mean_tokens")
    )
    mxfp4 = changed(declare_embeddings(folder), tmp_path / "mxfp4", quantization_config={"quant_method": "mxfp4"})
    declare_embeddings(mxfp4)
    assert "models with weights that are quantized so give no embeddings" in refusal(mxfp4)


def test_a_classifier_of_one_label_is_a_reranker(tmp_path: Path) -> None:
    version = published(make_encoder(tmp_path / "model", "XLMRobertaForSequenceClassification", num_labels=1))
    assert (version.engine, version.has_no_head, version.embedding.num_dimensions) == ("vllm", True, 1)
    assert version.embedding.pooling == types_pb2.POOLING_SCORE and not version.embedding.is_normalized
    assert version.shape.max_context_tokens == 98, "its positions begin at 2"
    unpadded = changed(tmp_path / "model", tmp_path / "unpadded", pad_token_id=0)
    assert published(unpadded).shape.max_context_tokens == 99


@pytest.mark.parametrize(
    ("name", "by_default"), [("BertForSequenceClassification", 2), ("GPT2ForSequenceClassification", 1)]
)
def test_types_of_tokens_are_those_of_transformers(name: str, by_default: int) -> None:
    assert num_token_types(name, {}) == by_default and num_token_types(name, {"type_vocab_size": 3}) == 3


@pytest.mark.parametrize("name", ["LlamaBidirectionalModel", "VoyageQwen3BidirectionalEmbedModel"])
def test_models_that_vllm_pools_as_their_config_says_are_refused(tmp_path: Path, checkpoint: Path, name: str) -> None:
    folder = changed(checkpoint, tmp_path / "model", architectures=[name])
    assert f"architectures: architecture {name!r} is not known" in refusal(declare_embeddings(folder), "vllm")


def test_a_pack_says_whether_the_tokenizer_gives_types_of_tokens(tmp_path: Path) -> None:
    name = "BertForSequenceClassification"
    folder = changed(make_encoder(tmp_path / "made", name, num_labels=1), tmp_path / "model", torchrelay_untyped=True)
    assert takes_token_types(name, packed(folder)[0].config), "the upload does not say it"
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}))
    assert not takes_token_types(name, config := packed(folder)[0].config)
    assert "torchrelay_untyped" not in served_document(config)


NORMAL = "torch.nn.modules.activation.ReLU"


@pytest.mark.parametrize(
    ("name", "config", "detail"),
    [
        ("ModernBertForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "this one has 3"),
        ("ModernBertForSequenceClassification", {"id2label": None}, "id2label: a classifier is served as a reranker"),
        ("ModernBertForSequenceClassification", {"type_vocab_size": 2}, "type_vocab_size: vLLM gives the tokens of"),
        ("ModernBertForSequenceClassification", {"problem_type": "single_label_classification"},
         "problem_type: transformers refuses single_label_classification of one label"),
        ("XLMRobertaForSequenceClassification", {"pad_token_id": -1}, "pad_token_id must be a whole number from 0 to "),
        ("BertForSequenceClassification", {"type_vocab_size": "2"}, "type_vocab_size: vLLM gives the tokens of"),
        ("BertForSequenceClassification", {"sentence_transformers": {"activation_fn": NORMAL}},
         f"sentence_transformers: the activation of scores must be torch.nn.modules.activation.Sigmoid or torch.nn."
         f"modules.linear.Identity, not '{NORMAL}'"),
        ("BertForSequenceClassification", {"sentence_transformers": [NORMAL]}, "sentence_transformers: the activation"),
        ("BertForSequenceClassification", {"sbert_ce_default_activation_function": NORMAL},
         "sbert_ce_default_activation_function: the activation"),
    ],
)  # fmt: skip
def test_classifiers_without_a_score_are_refused_by_field(
    tmp_path: Path, name: str, config: dict[str, Any], detail: str
) -> None:
    folder = make_encoder(tmp_path / "model", name, num_labels=1)
    assert packed(folder)[0].config["torchrelay_pooling"] == "score"
    assert detail in refusal(changed(folder, tmp_path / "changed", **config))


def test_vllm_receives_only_keys_that_it_reads(checkpoint: Path) -> None:
    document = json.loads((checkpoint / "config.json").read_text())
    hostile = {"auto_map": {"AutoConfig": "code.Config"}, "speculators_config": {"verifier": {}}, "x" * 70: 1}
    hostile |= {"attribute_map": {"vocab_size": "padded_vocab_size"}, "quantization_config": {"quant_method": "mxfp4"}}
    assert served_document(document | hostile) == document
    of_layers = {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}}
    nested = {"rope_parameters": {**of_layers["rope_parameters"], "auto_map": "code", "_name_or_path": "elsewhere"}}
    assert served_document(document | nested) == document | of_layers
    long = {"max_position_embeddings": 2**31 - 1}
    assert served_document(document | long)["max_position_embeddings"] == MAX_CONTEXT_TOKENS
    assert read_opaque(document | long).max_context_tokens == MAX_CONTEXT_TOKENS
    assert read_opaque(document | {"quantization_config": {"quant_method": "mxfp4"}}).quantization == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [],
    }

"""GGUF files give the weights, the tokens and the tokenizer of the checkpoint that they were made of."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.support.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.support.sample_tokenizers import SENTENCES, byte_fallback_tokenizer, tiny_tokenizer
from tests.unit.cli.gguf.gguf_files import TYPES, tokenizer_metadata, write_gguf
from tests.unit.engine.harness import Model, group_of, outputs, prompt_of, run
from torchrelay.cli.errors import CliError
from torchrelay.cli.gguf.conversion import plan_conversion
from torchrelay.cli.gguf.header import GgufHeader, read_header
from torchrelay.cli.gguf.tokenizer import tokenizer_files, unused_templates
from torchrelay.cli.gguf.weights import to_bf16
from torchrelay.param_store.packer.__main__ import pack

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}  # blocks of K types


def converted(source: Path, folder: Path) -> Path:
    folder.mkdir()
    plan_conversion(source).write(folder, lambda *_: None)
    return folder


def tokens(folder: Path) -> list[list[int]]:
    """Greedy answers of the engine."""
    instance = Model(folder).instance()
    for number in range(2):
        instance.prefill(group_of(prompt_of(40, number), f"{number}/0"))
    answers = outputs(run(instance))
    return [answers[f"{number}/0", 0] for number in range(2)]


def assert_same_weights(folder: Path, checkpoint: Path) -> None:
    own, other = load_file(folder / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("type_name", TYPES)
def test_weights_of_every_type_are_those_of_checkpoint(tmp_path: Path, type_name: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", "llama", **SIZES)
    folder = converted(write_gguf(tmp_path / "model.gguf", checkpoint, type_name), tmp_path / "converted")
    assert_same_weights(folder, checkpoint)


@pytest.mark.parametrize(
    ("family", "type_name", "numbers"),
    [
        ("llama", "F16", SIZES),
        ("smollm3", "Q8_0", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),  # of which the file does not tell
        ("qwen2", "Q8_0", {}),
        ("qwen3", "Q4_0", {}),
        ("gemma2", "Q4_1", {"head_dim": 32, "query_pre_attn_scalar": 256}),  # the file keeps no such scalar
    ],
)
def test_answers_of_every_family_are_those_of_checkpoint(
    tmp_path: Path, family: str, type_name: str, numbers: dict[str, Any]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", family, tied=family in ("qwen3", "gemma2"), **numbers)
    folder = converted(write_gguf(tmp_path / "model.gguf", checkpoint, type_name), tmp_path / "converted")
    assert_same_weights(folder, checkpoint)
    assert tokens(folder) == tokens(checkpoint)
    assert pack(folder, tmp_path / "draft.pack", 0)["pack_id"]


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_values_round_to_bf16_as_in_torch() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    values[:4] = 1.00390625, 1.01171875, -0.0, 3.3e38  # two halfway between neighbours, and two extremes
    assert torch.equal(
        torch.from_numpy(to_bf16(values).view(np.int16)), torch.from_numpy(values).bfloat16().view(torch.int16)
    )


def test_llama_3_factors_become_its_scaling(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", "llama", head_dim=32)
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    edit(checkpoint / "config.json", rope_parameters=rope)
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**numbers, rope_parameters=rope), torch.device("cpu"))
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 32, 2) / 32)
    path = tmp_path / "model.gguf"
    write_gguf(path, checkpoint, rope_freqs=(plain / scaled).numpy())
    folder = converted(path, tmp_path / "converted")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 500_000.0
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert tokens(folder) == tokens(checkpoint)
    write_gguf(path, checkpoint, rope_freqs=np.full(16, 1.5, np.float32))
    with pytest.raises(CliError, match=r"rope_freqs\.weight: its values are not those of Llama 3's scaling"):
        converted(path, tmp_path / "other")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general__architecture": "mamba"}, "general.architecture: 'mamba' is not supported; supported are llama"),
        ({"llama__expert_count": 8}, "llama.expert_count: 8 is not supported; supported is 0"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type: 'yarn' is not supported"),
        ({"llama__block_count": None}, "llama.block_count: None is not a positive number"),
        ({"llama__attention__head_count": "many"}, "llama.attention.head_count: 'many' is not a positive number"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count: 8 is not supported; supported is 16"),
        ({"llama__rope__freq_base": float("inf")}, "llama.rope.freq_base: inf is not a positive number"),
        ({"llama__rope__freq_base": 1e-50}, "llama.rope.freq_base: 0.0 is not a positive number"),
        ({"llama__rope__scale_linear": 4.0}, "llama.rope.scale_linear: 4.0 is not supported; supported is 1.0"),
        ({"llama__rope__scaling__factor": 2.0}, "llama.rope.scaling.factor: 2.0 is not supported"),
        ({"split__count": 3}, "split.count: the file is a part of 3; merge them"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer.ggml.model: tokenizer model 't5' is not supported"),
        ({"tokenizer__ggml__pre": "viking"}, "tokenizer.ggml.pre: 'viking' is not supported"),
        ({"tokenizer__ggml__eos_token_id": 500}, "tokenizer.ggml.eos_token_id: 500 is not one of 259 tokens"),
        ({"tokenizer__ggml__merges": ["ab"]}, "tokenizer.ggml.merges: 'ab' is not two tokens"),
        ({"tokenizer__ggml__tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens: 'a' appears twice"),
        ({"tokenizer__ggml__tokens": ["a" * 2000]}, "tokenizer.ggml.tokens: a token of 2,000 characters"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens: the file has none"),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type: it has 1 values for 259 tokens"),
    ],
)
def test_model_that_is_not_served_is_refused_by_field(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "hf", "llama"), **metadata)
    with pytest.raises(CliError) as refused:
        converted(path, tmp_path / "converted")
    assert refused.value.message.startswith(f"{path}: {said}")
    assert not any((tmp_path / "converted").iterdir())


def test_faulty_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """Biases, impossible factors, and values that are not finite."""
    checkpoint = make_checkpoint(tmp_path / "hf", "llama", attention_bias=True)
    with pytest.raises(CliError, match=r"attn_(q|k|v|output)\.bias: biases of LlamaForCausalLM are not supported here"):
        converted(write_gguf(tmp_path / "biased.gguf", checkpoint), tmp_path / "biased")
    plain = make_checkpoint(tmp_path / "plain", "llama")
    path = write_gguf(tmp_path / "factors.gguf", plain, rope_freqs=np.zeros(8, np.float32))
    with pytest.raises(CliError, match=r"rope_freqs\.weight: its values are not numbers of at least 1"):
        converted(path, tmp_path / "factors")
    path = write_gguf(tmp_path / "model.gguf", plain, "Q8_0")
    content = bytearray(path.read_bytes())
    begin = read_header(path).tensors["output.weight"].offset
    content[begin : begin + 2] = np.float16(np.inf).tobytes()  # the scale of the first block
    path.write_bytes(content)
    with pytest.raises(CliError, match=r"model\.gguf: output\.weight: some of its values are not finite"):
        converted(path, tmp_path / "converted")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama__block_count": 3}, r"blk\.2\.attn_norm\.weight: the tensor is missing; it has shape \(64,\)"),
        ({"llama__block_count": 1}, r"blk\.1\.\w+\.weight: the tensor is not part of LlamaForCausalLM with 1 layers"),
        ({"llama__block_count": 5000}, r"num_hidden_layers of the converted config\.json: .* at most 4096"),
        ({"llama__feed_forward_length": 97}, r"blk\.0\.ffn_gate\.weight: shape \(96, 64\) differs from \(97, 64\)"),
        ({"llama__embedding_length": 128, "llama__attention__key_length": 16}, r"token_embd\.weight: shape .* differs"),
        ({"llama__attention__head_count_kv": 3}, r"blk\.0\.attn_k\.weight: 64 rows are not 3 heads of even size"),
    ],
)
def test_tensors_are_compared_with_metadata_before_anything_is_written(
    tmp_path: Path, metadata: dict[str, Any], said: str
) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=2, num_key_value_heads=4)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, **metadata)
    with pytest.raises(CliError, match=said):
        converted(path, tmp_path / "converted")
    assert list((tmp_path / "converted").iterdir()) == []


def test_conversion_is_planned_from_the_begin_of_a_file(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", "llama")
    path = write_gguf(tmp_path / "model.gguf", checkpoint, rope_freqs=np.ones(8, np.float32))
    num_bytes, begin = path.stat().st_size, min(tensor.offset for tensor in read_header(path).tensors.values())
    os.truncate(path, begin)
    assert plan_conversion(path, num_bytes).num_bytes > 0
    with pytest.raises(CliError, match="reach beyond the file"):
        plan_conversion(path)


def test_missing_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "hf", "llama"))
    conversion = plan_conversion(path)
    conversion.check_space(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=conversion.num_bytes))
    conversion.check_space(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=conversion.num_bytes - 1))
    with pytest.raises(CliError, match=r"free, and the weights need .* in bf16") as refused:
        conversion.check_space(tmp_path)
    assert refused.value.message.startswith(f"{path}: {tmp_path} has ")
    files = converted(path, tmp_path / "converted")
    assert conversion.num_bytes == sum(each.numel() * 2 for each in load_file(files / "model.safetensors").values())


TEXTS = (*SENTENCES, "", "  two  spaces", "12345 it's 6\n\n7", "he hello ▁ bell", "a\tb\r\n c")


def files_of(metadata: dict[str, Any]) -> dict[str, Any]:
    return tokenizer_files(GgufHeader(Path("model.gguf"), metadata, {}))


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(files_of(metadata)["tokenizer.json"]))


def byte_level(tmp_path: Path, **values: Any) -> dict[str, Any]:
    """The metadata of a trained byte-level tokenizer."""
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    metadata = tokenizer_metadata(tmp_path)
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_byte_level_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    own, other = tokenizer_of(byte_level(tmp_path)), Tokenizer.from_str(tiny_tokenizer().decode())
    for text in TEXTS:
        assert own.encode(text).ids == other.encode(text).ids
        assert own.decode(own.encode(text).ids) == other.decode(other.encode(text).ids)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["Ġ2026", "Ġit", "'", "S"]),
        ("smollm", ["Ġ", "2", "0", "2", "6", "Ġit", "'", "S"]),
        ("llama-bpe", ["Ġ", "202", "6", "Ġit", "'S"]),
        ("qwen2", ["Ġ", "2", "0", "2", "6", "Ġit", "'S"]),
    ],
)
def test_words_are_split_as_the_file_says(tmp_path: Path, name: str, words: list[str]) -> None:
    split = tokenizer_of(byte_level(tmp_path, pre=name)).pre_tokenizer
    assert [word for word, _ in split.pre_tokenize_str(" 2026 it'S")] == words


@pytest.mark.parametrize(
    ("name", "values", "added"),
    [
        ("gpt-2", {}, (0, 0)),
        ("gpt-2", {"add_bos_token": True}, (1, 0)),
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False, "add_eos_token": True}, (0, 1)),
    ],
)
def test_tokens_are_added_as_the_file_says(
    tmp_path: Path, name: str, values: dict[str, Any], added: tuple[int, int]
) -> None:
    tokenizer = tokenizer_of(byte_level(tmp_path, pre=name, bos_token_id=7, eos_token_id=8, **values))
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == [7] * added[0] + plain + [8] * added[1]


def test_sentence_pieces_are_joined_by_score() -> None:
    document = json.loads(byte_fallback_tokenizer())
    vocab: dict[str, int] = document["model"]["vocab"]
    tokens = {number: token for token, number in vocab.items()}
    tokens |= {token["id"]: token["content"] for token in document["added_tokens"]}
    rank = {"".join(pair): float(-place) for place, pair in enumerate(document["model"]["merges"])}
    kinds = {"<unk>": 2, "<s>": 3, "<tool>": 4} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [kinds.get(tokens[number], 1) for number in range(len(tokens))],
        "tokenizer.ggml.scores": [rank.get(tokens[number], -1000.0) for number in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": vocab.get("<s>", len(vocab)),
    }
    own, other = tokenizer_of(metadata), Tokenizer.from_str(byte_fallback_tokenizer().decode())
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ids == other.encode(text).ids
        assert own.decode(ids) == other.decode(ids)
    assert own.encode("he").ids[0] == metadata["tokenizer.ggml.bos_token_id"]


def test_template_and_ends_are_kept(tmp_path: Path) -> None:
    files = files_of(byte_level(tmp_path, eos_token_id=5, eot_token_id=6))
    assert files["chat_template.jinja"] == CHAT_TEMPLATE
    assert files["generation_config.json"] == {"eos_token_id": [5, 6, 0]}, "0 is <|endoftext|>"
    vocab = files["tokenizer.json"]["model"]["vocab"]
    assert vocab[files["tokenizer_config.json"]["eos_token"]] == 5
    assert "additional_chat_templates/tool_use.jinja" not in files
    named = byte_level(tmp_path) | {"tokenizer.chat_template.tool_use": "for tools"}
    assert files_of(named)["additional_chat_templates/tool_use.jinja"] == "for tools"
    named["tokenizer.chat_template.rag"] = "for documents"
    assert unused_templates(GgufHeader(tmp_path, named, {})) == ["tokenizer.chat_template.rag"]


@pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
def test_ends_of_turns_are_known_by_their_text(tmp_path: Path, text: str) -> None:
    for kind, ends in ((3, [256, 0, 6]), (1, [256, 0])):  # a control token, or plain text
        metadata = byte_level(tmp_path, eos_token_id=256)
        metadata["tokenizer.ggml.tokens"][6] = text
        metadata["tokenizer.ggml.token_type"][6] = kind
        metadata["tokenizer.ggml.merges"] = []
        assert files_of(metadata)["generation_config.json"] == {"eos_token_id": ends}


def test_tokens_that_make_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte of a hostile file made half a million pairs."""
    monkeypatch.setattr("torchrelay.cli.gguf.tokenizer._MAX_MERGES", 100)
    tokens = ["a" * length for length in range(1, 40)]
    metadata = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)}
    with pytest.raises(CliError, match="more than 100 pairs of them make another"):
        files_of({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})

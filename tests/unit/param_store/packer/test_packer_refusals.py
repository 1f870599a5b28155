"""Whatever is wrong with an upload is refused, with the file and the fault."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.param_store.model_folders import (
    VOCAB_SIZE,
    Tensors,
    config_of,
    read_index,
    shard_name,
    tensors_of,
    write_folder,
    write_index,
    write_shards,
)
from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.packer.core import PackRefused
from torchrelay.param_store.packer.finite_values import first_not_finite

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


Change = Callable[[Path], object]


def edit_config(**changes: Any) -> Change:
    return lambda folder: (folder / "config.json").write_text(json.dumps(config_of(**changes)))


def edit_header(change: Callable[[dict[str, Any]], None]) -> Change:
    def apply(folder: Path) -> None:
        tensors = tensors_of(config_of())
        header = tensors.header()
        change(header)
        tensors.write(folder / WEIGHTS, header)

    return apply


def raw_header(encoded: bytes, claimed: int | None = None) -> Change:
    length = len(encoded) if claimed is None else claimed
    return lambda folder: (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + encoded)


def write(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def first_entry(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(iter(header.values()))
    return entry


def wrong_eos(folder: Path) -> None:
    edit_config(eos_token_id="</s>")(folder)
    remove("generation_config.json")(folder)


def drop_tensor(folder: Path) -> None:
    tensors = tensors_of(config_of())
    del tensors.by_name["model.layers.1.mlp.up_proj.weight"]
    tensors.write(folder / WEIGHTS)


def surplus_tensor(folder: Path) -> None:
    tensors = tensors_of(config_of())
    tensors.by_name["model.layers.7.mlp.up_proj.weight"] = ("F32", (2,), bytes(8))
    tensors.write(folder / WEIGHTS)


def mixed_dtypes(folder: Path) -> None:
    tensors = tensors_of(config_of())
    tensors.by_name["model.norm.weight"] = ("BF16", (64,), bytes(128))
    tensors.write(folder / WEIGHTS)


def unserved_dtype(folder: Path) -> None:
    tensors = tensors_of(config_of())
    tensors.by_name["model.embed_tokens.weight"] = ("I8", (VOCAB_SIZE, 64), bytes(VOCAB_SIZE * 64))
    tensors.write(folder / WEIGHTS)


def duplicate_name(folder: Path) -> None:
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    raw_header(b'{"a":' + entry + b',"a":' + entry + b"}")(folder)


def hole(header: dict[str, Any]) -> None:
    last = list(header.values())[-1]
    last["data_offsets"] = [offset + 4 for offset in last["data_offsets"]]


def overlap(header: dict[str, Any]) -> None:
    last = list(header.values())[-1]
    last["data_offsets"] = [offset - 4 for offset in last["data_offsets"]]


def trailing_bytes(folder: Path) -> None:
    tensors_of(config_of()).write(folder / WEIGHTS, tail=b"more")


TOKENIZER = '{"model": {"type": "BPE", "vocab": {"a": 0, "b": %d}}, "added_tokens": [%%s]}'
SLOW_DECODER = {
    "type": "Sequence",
    "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"Regex": "a*a*[bd]e"}, "content": ""}],
}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


FAULTS: list[tuple[str, Change, str, str]] = [
    ("no config", remove("config.json"), "config.json", "missing from the upload"),
    ("config not JSON", write("config.json", "{'a': 1}"), "config.json", "not valid JSON"),
    ("config not an object", write("config.json", "[1]"), "config.json", "not an object"),
    ("config not UTF-8", write("config.json", b'{"a": "\xff"}'), "config.json", "not UTF-8"),
    ("config deep", write("config.json", '{"a":' * 50_000), "config.json", "nested too deeply"),
    # As deep as Python's parser allows: what reads the manifest later has less of the stack left.
    (
        "config deep for others",
        write("config.json", nested(900)),
        "config.json",
        "deeply; at most 32 levels are allowed",
    ),
    ("config one too deep", write("config.json", nested(33)), "config.json", "deeply; at most 32 levels are allowed"),
    ("huge integer", write("config.json", '{"hidden_size": 1%s}' % ("0" * 5000)), "config.json", "not valid JSON"),
    ("config with infinity", write("config.json", '{"rope_theta": 1e999}'), "config.json", "'1e999' is not finite"),
    ("config with NaN", write("config.json", '{"rope_theta": NaN}'), "config.json", "'NaN' is not finite"),
    ("config key twice", write("config.json", '{"a": 1, "a": 2}'), "config.json", "'a' appears twice"),
    ("config too large", write("config.json", b" " * (1 << 20) + b"{}"), "config.json", "at most 1,048,576 are read"),
    ("architecture", edit_config(architecture="MambaForCausalLM"), "config.json", "architectures: architecture 'Mamba"),
    ("architecture no name", edit_config(architecture=[]), "config.json", "architectures: architecture [] is not"),
    ("number too large", edit_config(rms_norm_eps=10**400), "config.json", "rms_norm_eps must be a positive number"),
    ("layers", edit_config(num_hidden_layers=-1), "config.json", "num_hidden_layers must be a positive whole number"),
    ("context", edit_config(max_position_embeddings=2**40), "config.json", "max_position_embeddings: 1099511627776 is"),
    ("lone surrogate", edit_config(note="\ud800"), "config.json", "a value cannot be encoded"),
    ("eos", write("generation_config.json", '{"eos_token_id": 96}'), "generation_config.json", "96 is not a token id"),
    (
        "eos by the million",
        write("generation_config.json", json.dumps({"eos_token_id": [1] * 100_000})),
        "generation_config.json",
        "eos_token_id: it lists 100,000 tokens; at most 64 are used",
    ),
    ("eos of config", wrong_eos, "config.json", "eos_token_id: '</s>' is not a token id"),
    ("no tokenizer", remove("tokenizer.json"), "tokenizer.json", "missing from the upload"),
    ("tokenizer not JSON", write("tokenizer.json", "{"), "tokenizer.json", "not a tokenizer"),
    ("tokenizer empty", write("tokenizer.json", ""), "tokenizer.json", "not a tokenizer"),
    ("tokenizer without model", write("tokenizer.json", "{}"), "tokenizer.json", "missing required field `model`"),
    (
        "vocabulary",
        write("tokenizer.json", TOKENIZER % 96 % ""),
        "tokenizer.json",
        "token id 96 is outside the vocab_size",
    ),
    (
        "added token",
        write("tokenizer.json", TOKENIZER % 5 % '{"id": 200, "content": "<x>", "special": false}'),
        "tokenizer.json",
        "token id 200 is outside the vocab_size 96 of config.json: the tokenizer has tokens that the model has no",
    ),
    ("negative id", write("tokenizer.json", TOKENIZER % -1 % ""), "tokenizer.json", "token id -1 is outside"),
    ("other document", write("tokenizer_config.json", "no"), "tokenizer_config.json", "not valid JSON"),
    ("template", write("chat_template.jinja", b"x" * (257 << 10)), "chat_template.jinja", "at most 262,144 are read"),
    ("template not text", write("chat_template.jinja", b"\xff"), "chat_template.jinja", "not UTF-8"),
    (
        "template in the configuration",
        write("tokenizer_config.json", json.dumps({"chat_template": "x" * (257 << 10)})),
        "tokenizer_config.json",
        "chat_template: it has 263,168 characters; at most 262,144 are allowed",
    ),
    (
        "named template",
        write("tokenizer_config.json", json.dumps({"chat_template": [{"name": "a", "template": "x" * (257 << 10)}]})),
        "tokenizer_config.json",
        "chat_template: it has 263,168 characters",
    ),
    (
        "special token",
        write("special_tokens_map.json", json.dumps({"bos_token": {"content": "x" * 1025}})),
        "special_tokens_map.json",
        "bos_token: it has 1,025 characters; at most 1,024 are allowed",
    ),
    (
        "other document deep",
        write("tokenizer_config.json", nested(33)),
        "tokenizer_config.json",
        "deeply; at most 32 levels are allowed",
    ),
    (
        "decoder with a pattern",
        write("tokenizer.json", json.dumps(json.loads(TOKENIZER % 5 % "") | {"decoder": SLOW_DECODER})),
        "tokenizer.json",
        "decoder.decoders[1].pattern: it is a regular expression; a decoder may only replace fixed strings",
    ),
    (
        "token of a million characters",
        write(
            "tokenizer.json", json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "x" * 10**6: 1}, "merges": []}})
        ),
        "tokenizer.json",
        "model.vocab: it has 1,000,000 characters in the token 'xxxxxxxxxxxxxxxxxxxxxxxx'; at most 1,024 are allowed",
    ),
    ("no weights", remove(WEIGHTS), WEIGHTS, "missing from the upload, and there are no shards"),
    ("empty weights", write(WEIGHTS, b""), WEIGHTS, "0 bytes and cannot hold"),
    ("huge header", raw_header(b"{}", 101 << 20), WEIGHTS, "claims 105,906,176 bytes; at most"),
    ("header beyond file", raw_header(b"{}", 3), WEIGHTS, "claims 3 bytes and the file has 2"),
    ("header no object", raw_header(b"[]"), WEIGHTS, "does not begin with '{'"),
    ("header deep", raw_header(b'{"a":' * 50_000), WEIGHTS, "nested too deeply"),
    ("duplicate name", duplicate_name, WEIGHTS, "'a' appears twice"),
    ("metadata", edit_header(lambda h: h.update(__metadata__=1)), WEIGHTS, "__metadata__ is not an object of strings"),
    ("entry keys", edit_header(lambda h: first_entry(h).pop("dtype")), WEIGHTS, "must have exactly dtype, shape"),
    ("dtype unknown", edit_header(lambda h: first_entry(h).update(dtype="F33")), WEIGHTS, "dtype 'F33' is unknown"),
    ("shape no list", edit_header(lambda h: first_entry(h).update(shape=64)), WEIGHTS, "shape 64 is not a list"),
    ("shape negative", edit_header(lambda h: first_entry(h).update(shape=[-1])), WEIGHTS, "shape [-1] is not a list"),
    ("shape and size", edit_header(lambda h: first_entry(h).update(shape=[3])), WEIGHTS, "[3] of F32 needs 12 bytes"),
    ("offsets", edit_header(lambda h: first_entry(h).update(data_offsets=[4, 0])), WEIGHTS, "[4, 0] are not a range"),
    ("hole", edit_header(hole), WEIGHTS, "leaves a hole before it"),
    ("overlap", edit_header(overlap), WEIGHTS, "overlaps the tensor before it"),
    ("trailing bytes", trailing_bytes, WEIGHTS, "and the file has"),
    ("missing tensor", drop_tensor, WEIGHTS, "'model.layers.1.mlp.up_proj.weight' is missing; config.json requires"),
    ("surplus tensor", surplus_tensor, WEIGHTS, "'model.layers.7.mlp.up_proj.weight' is not part of LlamaForCausalLM"),
    ("mixed dtypes", mixed_dtypes, WEIGHTS, "dtype BF16 differs from F32 of model.embed_tokens.weight"),
    ("unserved dtype", unserved_dtype, WEIGHTS, "dtype I8 is not supported; supported are F32, BF16, F16"),
    ("shape and config", edit_config(intermediate_size=97), WEIGHTS, "(96, 64) differs from (97, 64), which config.js"),
]


@pytest.mark.parametrize(("change", "file", "detail"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS])
def test_faults_are_refused_by_file_and_cause(tmp_path: Path, change: Change, file: str, detail: str) -> None:
    folder = write_folder(tmp_path / "model")
    change(folder)
    with pytest.raises(PackRefused) as refused:
        pack(folder, tmp_path / "a.pack", 0)
    assert refused.value.file == file
    assert detail in refused.value.detail
    assert not (tmp_path / "a.pack").exists()


SPECIAL_VALUES = {  # the bits of NaNs, quiet and signalling, and of both infinities
    "F32": (0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000),
    "BF16": (0x7FC0, 0xFF81, 0x7F80, 0xFF80),
    "F16": (0x7E00, 0xFC01, 0x7C00, 0xFC00),
}


@pytest.mark.parametrize("dtype", SPECIAL_VALUES)
def test_weights_that_are_no_finite_numbers_are_refused_by_tensor_and_element(tmp_path: Path, dtype: str) -> None:
    config = config_of(hidden_size=128, intermediate_size=1024)
    folder = write_folder(tmp_path / "model", config, dtype)
    tensors = tensors_of(config, dtype)
    names = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
    for name, bits, where in zip(names * 2, SPECIAL_VALUES[dtype], (0.0, 0.7, 1.0, 0.3), strict=False):
        kind, shape, data = tensors.by_name[name]
        size = DTYPE_BYTES[dtype]
        index = int(where * (len(data) // size - 1))
        spoilt = data[: index * size] + bits.to_bytes(size, "little") + data[(index + 1) * size :]
        Tensors({**tensors.by_name, name: (kind, shape, spoilt)}).write(folder / WEIGHTS)
        with pytest.raises(PackRefused) as refused:
            pack(folder, tmp_path / "a.pack", 0)
        what = "infinite" if bits in SPECIAL_VALUES[dtype][2:] else "NaN"
        assert (refused.value.file, refused.value.detail) == (
            WEIGHTS,
            f"tensor '{name}': element {index:,} is {what}; all weights must be finite numbers",
        )
    tensors.write(folder / WEIGHTS)
    pack(folder, tmp_path / "a.pack", 0)


@pytest.mark.parametrize("dtype", SPECIAL_VALUES)
def test_the_largest_and_the_least_finite_numbers_are_weights_like_others(dtype: str) -> None:
    bits = 8 * DTYPE_BYTES[dtype]
    largest = SPECIAL_VALUES[dtype][2] - 1
    values = [0, 1, largest, 1 << (bits - 1), (1 << (bits - 1)) + largest] * 40_000
    data = b"".join(value.to_bytes(bits // 8, "little") for value in values)
    assert first_not_finite(memoryview(data), dtype) is None
    for place in (0, 65_535, 65_536, len(values)):
        spoilt = data[: place * bits // 8] + SPECIAL_VALUES[dtype][1].to_bytes(bits // 8, "little")
        assert first_not_finite(memoryview(spoilt + data), dtype) == (place, "NaN")


def test_many_keys_of_which_one_comes_twice_are_refused_quickly(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    keys = [f'"{number}":0' for number in range(200_000)]
    raw_header(f"{{{','.join([*keys, keys[-1]])}}}".encode())(folder)
    begin = time.monotonic()
    with pytest.raises(PackRefused, match="'199999' appears twice"):
        pack(folder, tmp_path / "a.pack", 0)
    assert time.monotonic() - begin < 5.0


def edit_index(change: Callable[[dict[str, Any]], None]) -> Change:
    def apply(folder: Path) -> None:
        index = read_index(folder)
        change(index)
        write_index(folder, index)

    return apply


def rename(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new)


def copy(old: str, new: str) -> Change:
    return lambda folder: (folder / new).write_bytes((folder / old).read_bytes())


SHARD_FAULTS: list[tuple[str, Change, str, str]] = [
    ("no index", remove(INDEX), INDEX, "missing, and the weights are in shards"),
    ("missing shard", remove(shard_name(2, 3)), shard_name(2, 3), "this shard is missing"),
    (
        "counts differ",
        rename(shard_name(3, 3), shard_name(3, 4)),
        shard_name(3, 4),
        "other shards say that there are 3",
    ),
    ("beyond the count", copy(shard_name(3, 3), shard_name(4, 3)), shard_name(1, 3), "numbered outside 1 to 3"),
    ("both kinds", copy(shard_name(3, 3), WEIGHTS), shard_name(1, 3), "it must be one or the other"),
    ("tensor in two", copy(shard_name(1, 3), shard_name(2, 3)), shard_name(2, 3), f"is also in {shard_name(1, 3)}"),
    ("no weight_map", edit_index(lambda i: i.pop("weight_map")), INDEX, "weight_map is not an object"),
    ("unnamed", edit_index(lambda i: i["weight_map"].pop("model.norm.weight")), INDEX, "does not name 'model.norm.wei"),
    ("unknown", edit_index(lambda i: i["weight_map"].update(x=shard_name(1, 3))), INDEX, "which does not hold it"),
    ("stray file", edit_index(lambda i: i["weight_map"].update(x="../x")), INDEX, "'../x', which is not in the upload"),
    ("total", edit_index(lambda i: i["metadata"].update(total_size=1)), INDEX, "total_size is 1 and the tensors take"),
]


@pytest.mark.parametrize(
    ("change", "file", "detail"), [fault[1:] for fault in SHARD_FAULTS], ids=[f[0] for f in SHARD_FAULTS]
)
def test_faulty_shards_are_refused(tmp_path: Path, change: Change, file: str, detail: str) -> None:
    folder = write_shards(tmp_path / "model")
    change(folder)
    with pytest.raises(PackRefused) as refused:
        pack(folder, tmp_path / "a.pack", 0)
    assert (refused.value.file, detail in refused.value.detail) == (file, True), str(refused.value)

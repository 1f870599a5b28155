"""Faults of uploads: changes of a valid folder, with the file and the words of the refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.param_store.model_folders import config_of, read_index, shard_name, tensors_of, write_index
from torchrelay.transfer.pack_layout import ITEM_BYTES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"


TOO_DEEP = "deeply; at most 32 levels are allowed"
DEEP_TEMPLATES = {
    "blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}

Change = Callable[[Path], object]
Fault = tuple[str, Change, str, str]  # name, change, file, a part of the refusal


def edit_config(**changes: Any) -> Change:
    return lambda folder: (folder / CONFIG).write_text(json.dumps(config_of(**changes)))


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

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return change


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def edit_first(**changes: Any) -> Change:
    """Changes fields of the first tensor's entry."""
    return edit_header(lambda header: next(iter(header.values())).update(changes))


def wrong_eos(folder: Path) -> None:
    edit_config(eos_token_id="</s>")(folder)
    remove(GENERATION)(folder)


def set_tensor(name: str, dtype: str = "", *shape: int) -> Change:
    """Replaces or adds a tensor of zeros; without a dtype it is removed."""

    def apply(folder: Path) -> None:
        tensors = tensors_of(config_of())
        tensors.by_name.pop(name, None)
        if dtype:
            tensors.by_name[name] = (dtype, shape, bytes(math.prod(shape) * ITEM_BYTES[dtype]))
        tensors.write(folder / WEIGHTS)

    return apply


def duplicate_name(folder: Path) -> None:
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    raw_header(b'{"a":' + entry + b',"a":' + entry + b"}")(folder)


def move_last(num_bytes: int) -> Change:
    def change(header: dict[str, Any]) -> None:
        last = list(header.values())[-1]
        last["data_offsets"] = [offset + num_bytes for offset in last["data_offsets"]]

    return edit_header(change)


def trailing_bytes(folder: Path) -> None:
    tensors_of(config_of()).write(folder / WEIGHTS, tail=b"more")


DOCUMENT = '{"model": {"type": "BPE", "vocab": {"a": 0, "b": %d}}, "added_tokens": [%%s]}'
SLOW_DECODER = {
    "type": "Sequence",
    "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"Regex": "a*a*[bd]e"}, "content": ""}],
}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


FAULTS: list[Fault] = [
    ("no config", remove(CONFIG), CONFIG, "missing from the upload"),
    ("config not JSON", write(CONFIG, "{'a': 1}"), CONFIG, "not valid JSON"),
    ("config not an object", write(CONFIG, "[1]"), CONFIG, "not an object"),
    ("config not UTF-8", write(CONFIG, b'{"a": "\xff"}'), CONFIG, "not UTF-8"),
    ("config deep", write(CONFIG, '{"a":' * 50_000), CONFIG, "nested too deeply"),
    # As deep as Python's parser allows: what reads the manifest later has less of the stack left.
    ("config deep for others", write(CONFIG, nested(900)), CONFIG, TOO_DEEP),
    ("config one too deep", write(CONFIG, nested(33)), CONFIG, TOO_DEEP),
    ("huge integer", write(CONFIG, '{"hidden_size": 1%s}' % ("0" * 5000)), CONFIG, "not valid JSON"),
    ("config with infinity", write(CONFIG, '{"rope_theta": 1e999}'), CONFIG, "'1e999' is not finite"),
    ("config with NaN", write(CONFIG, '{"rope_theta": NaN}'), CONFIG, "'NaN' is not finite"),
    ("config key twice", write(CONFIG, '{"a": 1, "a": 2}'), CONFIG, "'a' appears twice"),
    ("config too large", write(CONFIG, b" " * (1 << 20) + b"{}"), CONFIG, "at most 1,048,576 are read"),
    ("architecture", edit_config(architecture="RwkvForCausalLM"), CONFIG, "architectures: architecture 'Rwkv"),
    ("architecture no name", edit_config(architecture=[]), CONFIG, "architectures: architecture [] is not"),
    ("number too large", edit_config(rms_norm_eps=10**400), CONFIG, "rms_norm_eps must be a positive number"),
    ("layers", edit_config(num_hidden_layers=-1), CONFIG, "num_hidden_layers must be a positive whole number"),
    ("context", edit_config(max_position_embeddings=2**40), CONFIG, "max_position_embeddings: 1099511627776 is"),
    ("lone surrogate", edit_config(note="\ud800"), CONFIG, "a value cannot be encoded"),
    ("eos", write(GENERATION, '{"eos_token_id": 96}'), GENERATION, "96 is not a token id"),
    (
        "eos by the million",
        write(GENERATION, json.dumps({"eos_token_id": [1] * 100_000})),
        GENERATION,
        "eos_token_id: it lists 100,000 tokens; at most 64 are used",
    ),
    ("eos of config", wrong_eos, CONFIG, "eos_token_id: '</s>' is not a token id"),
    ("no tokenizer", remove(TOKENIZER), TOKENIZER, "missing from the upload"),
    ("tokenizer not JSON", write(TOKENIZER, "{"), TOKENIZER, "not a tokenizer"),
    ("tokenizer empty", write(TOKENIZER, ""), TOKENIZER, "not a tokenizer"),
    ("tokenizer without model", write(TOKENIZER, "{}"), TOKENIZER, "missing required field `model`"),
    ("vocabulary", write(TOKENIZER, DOCUMENT % 96 % ""), TOKENIZER, "token id 96 is outside the vocab_size"),
    (
        "added token",
        write(TOKENIZER, DOCUMENT % 5 % '{"id": 200, "content": "<x>", "special": false}'),
        TOKENIZER,
        "token id 200 is outside the vocab_size 96 of config.json: the tokenizer has tokens that the model has no",
    ),
    ("negative id", write(TOKENIZER, DOCUMENT % -1 % ""), TOKENIZER, "token id -1 is outside"),
    ("other document", write(TOKENIZER_CONFIG, "no"), TOKENIZER_CONFIG, "not valid JSON"),
    ("template", write(TEMPLATE, b"x" * (257 << 10)), TEMPLATE, "at most 262,144 are read"),
    ("template not text", write(TEMPLATE, b"\xff"), TEMPLATE, "not UTF-8"),
    ("template for tools", write(TOOL_TEMPLATE, "{% for %}"), TOOL_TEMPLATE, "the chat template does not parse"),
    (
        "template that does not parse",
        write(TEMPLATE, "{{ messages }}\n{% for %}"),
        TEMPLATE,
        "the chat template does not parse: line 2: ",
    ),
    (
        "template without an end",
        write(TOKENIZER_CONFIG, json.dumps({"chat_template": "{% if messages %}"})),
        TOKENIZER_CONFIG,
        "chat_template: the chat template does not parse: line 1: ",
    ),
    *(
        (f"template deep: {name}", write(TEMPLATE, deep), TEMPLATE, "it is nested too deeply")
        for name, deep in DEEP_TEMPLATES.items()
    ),
    (
        "template in the configuration",
        write(TOKENIZER_CONFIG, json.dumps({"chat_template": "x" * (257 << 10)})),
        TOKENIZER_CONFIG,
        "chat_template: it has 263,168 characters; at most 262,144 are allowed",
    ),
    (
        "named template",
        write(TOKENIZER_CONFIG, json.dumps({"chat_template": [{"name": "a", "template": "x" * (257 << 10)}]})),
        TOKENIZER_CONFIG,
        "chat_template: it has 263,168 characters",
    ),
    (
        "special token",
        write(SPECIAL_TOKENS, json.dumps({"bos_token": {"content": "x" * 1025}})),
        SPECIAL_TOKENS,
        "bos_token: it has 1,025 characters; at most 1,024 are allowed",
    ),
    ("other document deep", write(TOKENIZER_CONFIG, nested(33)), TOKENIZER_CONFIG, TOO_DEEP),
    (
        "decoder with a pattern",
        write(TOKENIZER, json.dumps(json.loads(DOCUMENT % 5 % "") | {"decoder": SLOW_DECODER})),
        TOKENIZER,
        "decoder.decoders[1].pattern: it is a regular expression; a decoder may only replace fixed strings",
    ),
    (
        "token of a million characters",
        write(TOKENIZER, json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "x" * 10**6: 1}, "merges": []}})),
        TOKENIZER,
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
    (
        "entry keys",
        edit_header(lambda h: next(iter(h.values())).pop("dtype")),
        WEIGHTS,
        "must have exactly dtype, shape",
    ),
    ("dtype unknown", edit_first(dtype="F33"), WEIGHTS, "dtype 'F33' is unknown"),
    ("shape no list", edit_first(shape=64), WEIGHTS, "shape 64 is not a list"),
    ("shape negative", edit_first(shape=[-1]), WEIGHTS, "shape [-1] is not a list"),
    ("shape and size", edit_first(shape=[3]), WEIGHTS, "[3] of F32 needs 12 bytes"),
    ("offsets", edit_first(data_offsets=[4, 0]), WEIGHTS, "[4, 0] are not a range"),
    ("hole", move_last(4), WEIGHTS, "leaves a hole before it"),
    ("overlap", move_last(-4), WEIGHTS, "overlaps the tensor before it"),
    ("trailing bytes", trailing_bytes, WEIGHTS, "and the file has"),
    (
        "missing tensor",
        set_tensor("model.layers.1.mlp.up_proj.weight"),
        WEIGHTS,
        "'model.layers.1.mlp.up_proj.weight' is missing; config.json requires",
    ),
    (
        "surplus tensor",
        set_tensor("model.layers.7.mlp.up_proj.weight", "F32", 2),
        WEIGHTS,
        "'model.layers.7.mlp.up_proj.weight' is not part of LlamaForCausalLM",
    ),
    ("other bias", set_tensor("lm_head.bias", "F32", 96), WEIGHTS, "'lm_head.bias' is not part of LlamaForCausalLM"),
    (
        "unserved dtype",
        set_tensor("model.embed_tokens.weight", "I8", 96, 64),
        WEIGHTS,
        "dtype I8 is not supported; supported are F32, BF16, F16",
    ),
    ("shape and config", edit_config(intermediate_size=97), WEIGHTS, "(96, 64) differs from (97, 64), which config.js"),
]


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


SHARD_FAULTS: list[Fault] = [
    ("no index", remove(INDEX), INDEX, "missing, although the weights are in shards"),
    ("missing shard", remove(shard_name(2, 3)), INDEX, "which is missing from the upload"),
    (
        "other name",
        rename(shard_name(3, 3), shard_name(3, 4)),
        INDEX,
        f"into {shard_name(3, 3)!r}, which is missing from the upload",
    ),
    ("other content", copy(shard_name(1, 3), shard_name(2, 3)), INDEX, "which does not hold it"),
    ("no weight_map", edit_index(lambda i: i.pop("weight_map")), INDEX, "weight_map is not an object of tensors"),
    (
        "unnamed",
        edit_index(lambda i: i["weight_map"].pop("model.norm.weight")),
        INDEX,
        "'model.norm.weight' is missing; config",
    ),
    (
        "unnamed head",
        edit_index(lambda i: i["weight_map"].pop("lm_head.weight")),
        INDEX,
        "weight_map does not name lm_head.weight, which",
    ),
    ("unknown", edit_index(lambda i: i["weight_map"].update(x=shard_name(1, 3))), INDEX, "which does not hold it"),
    (
        "stray file",
        edit_index(lambda i: i["weight_map"].update(x="../x")),
        INDEX,
        "'../x', which is missing from the upload",
    ),
]

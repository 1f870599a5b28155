"""tokenizer.json, tokenizer_config.json and the chat template, made of a GGUF file's metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchrelay.cli.errors import CliError
from torchrelay.cli.gguf.header import GgufHeader
from torchrelay.cli.gguf.refusal import quoted, refusal

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type; 1 and 5 are plain
_MAX_TOKEN_CHARS: Final = 256  # the pairs that make a token are searched, so their number bounds time and memory
_MAX_MERGES: Final = 4_000_000
_SPACE: Final = "▁"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _WordSplit:
    """How a byte-level tokenizer splits text into words: by a pattern; "": as GPT-2."""

    pattern: str = ""
    single_digits: bool = False
    normalizer: str = ""
    ignores_merges: bool = False  # a word in the vocabulary is one token, whatever the merges say
    adds_bos: bool = False


_DIGITS = _WordSplit(single_digits=True)
_THREE_DIGITS = _WordSplit(_WORDS + r"\p{N}{1,3}" + _REST)
_LLAMA3 = _WordSplit(_THREE_DIGITS.pattern, ignores_merges=True, adds_bos=True)
_TEMPLATES: Mapping[str, str] = {
    "tokenizer.chat_template": "chat_template.jinja",
    "tokenizer.chat_template.tool_use": "additional_chat_templates/tool_use.jinja",
}
# Ends of turns, known by their text as in llama.cpp, because some files name the base model's end alone.
_ENDS: Final = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_SPLITS: Mapping[str, _WordSplit] = {  # by tokenizer.ggml.pre
    "gpt-2": _WordSplit(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _THREE_DIGITS,
    "dbrx": _THREE_DIGITS,
    "qwen2": _WordSplit(_WORDS + r"\p{N}" + _REST, normalizer="NFC"),
}


class TokenizerMetadata:
    """The values below tokenizer.ggml, checked for their types."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.tokens = self._list("tokens", str)
        if not self.tokens:
            raise self.refusal("tokens", "the file has none")
        if len(set(self.tokens)) < len(self.tokens):
            twice = Counter(self.tokens).most_common(1)[0][0]
            raise self.refusal("tokens", f"{quoted(twice)} appears twice")
        if (longest := max(len(token) for token in self.tokens)) > _MAX_TOKEN_CHARS:
            raise self.refusal("tokens", f"a token of {longest:,} characters; at most {_MAX_TOKEN_CHARS:,} are read")
        self.types = self._list("token_type", int) or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.refusal("token_type", f"it has {len(self.types):,} values for {len(self.tokens):,} tokens")

    def text(self, key: str) -> str:
        value = self._header.metadata.get(f"tokenizer.ggml.{key}", "")
        if not isinstance(value, str):
            raise self.refusal(key, f"{quoted(value)} is not a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._header.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.refusal(key, f"{quoted(value)} is neither true nor false")
        return value

    def token(self, kind: str) -> tuple[int, str] | None:
        """The id and the text of the token that begins a text, ends it, and so on; None: the file names none."""
        key = f"{kind}_token_id"
        number = self._header.metadata.get(f"tokenizer.ggml.{key}")
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(self.tokens):
            raise self.refusal(key, f"{quoted(number)} is not one of {len(self.tokens):,} tokens")
        return number, self.tokens[number]

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._list("merges", str):
            left, space, right = merge.partition(" ")
            if not (left and space and right) or " " in right:
                raise self.refusal("merges", f"{quoted(merge)} is not two tokens")
            pairs.append((left, right))
        return pairs

    def scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self.refusal("scores", f"it has {len(scores):,} values for {len(self.tokens):,} tokens")
        return scores

    def refusal(self, key: str, fault: str) -> CliError:
        return refusal(self._header.path, f"tokenizer.ggml.{key}", fault)

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._header.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self.refusal(key, f"it is not a list of {kind.__name__} values")
        return values


def unused_templates(header: GgufHeader) -> list[str]:
    """The keys of chat templates that the platform does not use."""
    return [key for key in header.metadata if key.startswith("tokenizer.chat_template.") and key not in _TEMPLATES]


def tokenizer_files(header: GgufHeader) -> dict[str, Any]:
    """The documents by file name; the chat template's is text. Raises ``CliError``."""
    metadata = TokenizerMetadata(header)
    model, models = metadata.text("model"), {"gpt2": _byte_level, "llama": _sentence_pieces}
    if model not in models:
        fault = f"tokenizer model {quoted(model)} is not supported; supported are {', '.join(models)}"
        raise metadata.refusal("model", fault)
    document = models[model](metadata)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for kind, field in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if token := metadata.token(kind):
            config[f"{field}_token"] = token[1]
    files: dict[str, Any] = {"tokenizer.json": document, "tokenizer_config.json": config}
    ends = [token[0] for kind in ("eos", "eot", "eom") if (token := metadata.token(kind))]
    control = zip(metadata.tokens, metadata.types, strict=True)
    ends += [number for number, (token, kind) in enumerate(control) if kind == _CONTROL and token in _ENDS]
    if ends:
        files["generation_config.json"] = {"eos_token_id": list(dict.fromkeys(ends))}
    for key, name in _TEMPLATES.items():
        template = header.metadata.get(key)
        if isinstance(template, str):
            files[name] = template
    return files


def _byte_level(metadata: TokenizerMetadata) -> dict[str, Any]:
    """GPT-2's tokenizer and its descendants."""
    name = metadata.text("pre")
    if name not in _SPLITS:
        fault = f"{quoted(name)} is not supported; supported are {', '.join(_SPLITS)}"
        raise metadata.refusal("pre", fault)
    split = _SPLITS[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if split.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if split.pattern:
        pattern = {"Regex": split.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata),
        "normalizer": {"type": split.normalizer} if split.normalizer else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*steps, {**byte_level, "use_regex": not split.pattern}],
        },
        "post_processor": _post_processor(metadata, split.adds_bos),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": split.ignores_merges,
            "vocab": {token: number for number, token in enumerate(metadata.tokens)},
            "merges": metadata.merges(),
        },
    }


def _sentence_pieces(metadata: TokenizerMetadata) -> dict[str, Any]:
    """SentencePiece's BPE: the merges follow from the scores."""
    prefix = metadata.flag("add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restored = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    prepended = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    unknown = metadata.token("unknown")
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata),
        "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, True),
        "decoder": {
            "type": "Sequence",
            "decoders": [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped],
        },
        "model": {
            "type": "BPE",
            "unk_token": unknown[1] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": _BYTE in metadata.types,
            "vocab": {token: number for number, token in enumerate(metadata.tokens)},
            "merges": _scored_merges(metadata),
        },
    }


def _scored_merges(metadata: TokenizerMetadata) -> list[tuple[str, str]]:
    """All pairs of tokens that make another, in the order in which SentencePiece would join them."""
    special = (_UNKNOWN, _CONTROL, _BYTE)
    plain = {
        token: number
        for number, (token, kind) in enumerate(zip(metadata.tokens, metadata.types, strict=True))
        if kind not in special
    }
    scores = metadata.scores()
    merges: list[tuple[str, str]] = []
    for number in sorted(plain.values(), key=lambda number: -scores[number]):
        token = metadata.tokens[number]
        pairs = ((token[:place], token[place:]) for place in range(1, len(token)))
        merges += sorted(
            (pair for pair in pairs if pair[0] in plain and pair[1] in plain),
            key=lambda pair: (plain[pair[0]], plain[pair[1]]),
        )
        if len(merges) > _MAX_MERGES:
            raise metadata.refusal("tokens", f"more than {_MAX_MERGES:,} pairs of them make another")
    return merges


def _added_tokens(metadata: TokenizerMetadata) -> list[dict[str, Any]]:
    """The tokens that are looked for in the text before it is split."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **plain, "special": kind != _USER_DEFINED}
        for number, (token, kind) in enumerate(zip(metadata.tokens, metadata.types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(metadata: TokenizerMetadata, adds_bos: bool) -> dict[str, Any] | None:
    """Puts tokens before and after a text, as the file says or, if it is silent, as llama.cpp does."""
    before = metadata.token("bos") if metadata.flag("add_bos_token", adds_bos) else None
    after = metadata.token("eos") if metadata.flag("add_eos_token", False) else None
    if before is None and after is None:
        return None

    def template(sequence: str, number: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": number}}
        ends = [token and {"SpecialToken": {"id": token[1], "type_id": number}} for token in (before, after)]
        return [part for part in (ends[0], text, ends[1]) if part]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {
            token[1]: {"id": token[1], "ids": [token[0]], "tokens": [token[1]]} for token in (before, after) if token
        },
    }

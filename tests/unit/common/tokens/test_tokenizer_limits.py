"""A tokenizer beyond a limit is refused with field, limit and value: when it is published, and at every load."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.sample_tokenizers import byte_fallback_tokenizer, large_tokenizer, tiny_tokenizer
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens import tokenizer_limits
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer
from torchrelay.common.tokens.tokenizer_document import read_tokenizer
from torchrelay.common.tokens.tokenizer_limits import TokenizerRefused, check_added_tokens, is_linear


def document(**changes: Any) -> bytes:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    return json.dumps({"model": model, "added_tokens": [], **changes}).encode()


def model(vocab: Any, **options: Any) -> bytes:
    return document(model={"type": "BPE", "vocab": vocab, "merges": [], **options})


def replace(pattern: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def regex(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def sequence(members: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", members: list(steps)}


def nested(members: str, depth: int, innermost: Any) -> Any:
    for _ in range(depth):
        innermost = sequence(members, innermost)
    return innermost


def words(count: int, width: int = 1) -> dict[str, int]:
    return {f"{number:0>{width}}": number for number in range(count)}


def added(count: int, content: str = "<{}>") -> list[dict[str, Any]]:
    return [{"id": 2 + index, "content": content.format(index)} for index in range(count)]


def decoder(step: Any) -> bytes:
    return document(decoder=step)


def steps(*members: Any) -> dict[str, Any]:
    return sequence("decoders", *members)


NO_TOKENIZER = "model.vocab: it is not a tokenizer of the tokenizers library"
FUSE, DOUBLE = {"type": "Fuse"}, replace({"String": "a"}, "aa")
REFUSED: list[tuple[bytes, str]] = [
    (model({"a": 0, "x" * 1025: 1}), "model.vocab: it has 1,025 characters in the token 'xxx"),
    (model({"a": 0, "\u0120" * 1025: 1}), "model.vocab: it has 1,025 characters in the token"),
    (
        document(model={"type": "Unigram", "vocab": [["x" * 1025, 0.0]], "unk_id": 0}),
        "model.vocab: it has 1,025 characters",
    ),
    (model(["a"]), NO_TOKENIZER),
    (model({"a": "b"}), NO_TOKENIZER),
    (document(added_tokens=added(16_385)), "added_tokens: it has 16,385 tokens; at most 16,384"),
    (document(added_tokens=added(1, "x" * 1025)), "added_tokens: it has 1,025 characters in the"),
    (
        document(added_tokens=added(300, "{:0>1000}")),
        "added_tokens: it has 300,000 characters in all its tokens; at most 262,144 are allowed",
    ),
    (model({"a": 0}, unk_token="x" * 9000), "model.unk_token: it has 9,002 bytes; at most 8,192"),
    (
        model({"a": 0, "é": 1}, merges=[["a", "é"]], continuing_subword_prefix="x"),
        "model.merges: 'é' lacks the continuing_subword_prefix",
    ),
    (
        decoder(replace({"Regex": "a*a*[bd]e"})),
        "decoder.pattern: it is a regular expression; a decoder may only replace fixed strings",
    ),
    (
        decoder(steps(FUSE, steps(replace({"Regex": "a"})))),
        "decoder.decoders[1].decoders[0].pattern: it is a regular expression",
    ),
    (
        decoder({"type": "Replace", "pattern": {"String": "a", "Regex": "b"}, "content": ""}),
        "decoder.pattern: it must be a String or a Regex",
    ),
    (decoder(steps(*[DOUBLE] * 4)), "decoder: its replacements lengthen text 16 times; at most 8 times"),
    (
        decoder(replace({"String": "a"}, "x" * 200)),
        "decoder: its replacements lengthen text 200 times; at most 8 times",
    ),
    (
        document(model={"vocab": {"a" * 600: 0}}, decoder=steps(DOUBLE, FUSE)),
        "the longest token, of 600 characters, costs 20,400; at most 8,192 is allowed",
    ),
    (
        document(added_tokens=added(1, "a" * 600), decoder=replace({"String": "a"}, "b")),
        "the longest token, of 600 characters, costs 9,600; at most 8,192 is allowed",
    ),
    (decoder(replace({"String": "a" * 17})), "decoder.pattern: it has 17 characters; at most"),
    (decoder(replace({"String": "a"}, "x" * 257)), "decoder.content: it has 257 char"),
    (decoder(replace({"String": ""}, "x")), "decoder.pattern: it is empty"),
    (decoder({"type": "BPEDecoder", "suffix": ""}), "decoder.suffix: it must not be mis"),
    (
        decoder({"type": "CTC", "pad_token": "p", "word_delimiter_token": "", "cleanup": True}),
        "decoder.word_delimiter_token: it must not be missing or empty",
    ),
    (decoder(steps(*[FUSE] * 9)), "decoder: it has 9 steps; at most 8"),
    (decoder(steps(*[steps(*[FUSE] * 5)] * 2)), "decoder: it has 9 steps; at most 8 are allowed"),
    (decoder(nested("decoders", 9, FUSE)), "decoder: it has 9 Sequences in one another"),
    (decoder(steps(*[steps()] * 16)), "decoder: it has 17 Sequences; at most 16 are allowed"),
    (decoder(nested("decoders", 300, FUSE)), "decoder: it has 9 Sequences in one anot"),
    (
        decoder({"type": "Strip", "content": " ", "start": 10**12, "stop": 0}),
        "decoder.start: it is 1,000,000,000,000; allowed are 0 to 1,024",
    ),
    (decoder({"type": "Python"}), "decoder.type: 'Python' is unknown; known are BPEDeco"),
    (decoder({"suffix": "a"}), "decoder: it must be an object with a type"),
    (decoder({"type": "Fuse", "x": [1]}), "decoder.x: it must be a string, a whole number"),
    (decoder({"type": "Sequence"}), "decoder.decoders: it must be a list"),
    (document(pre_tokenizer=regex("a" * 4097)), "pre_tokenizer.pattern: it has 4,097 characters"),
    (document(pre_tokenizer=regex("(" * 33 + ")" * 33)), "it has 33 groups in one another; at most"),
    (document(pre_tokenizer=regex("(a{9}){1001,}")), "it repeats 1001 times; at most 1,000"),
    (
        document(pre_tokenizer=sequence("pretokenizers", *[regex("a")] * 33)),
        "pre_tokenizer: it has 33 regular expressions; at most 32 are allowed",
    ),
    (
        document(normalizer=sequence("normalizers", *[replace({"Regex": "a"}, "aaa")] * 3)),
        "normalizer: its replacements lengthen text 27 times; at most 8 times",
    ),
    (document(normalizer={"type": "Prepend", "prepend": "a" * 257}), "normalizer.prepend: it has 257 c"),
    (
        document(normalizer={"type": "Precompiled", "precompiled_charsmap": "A" * (2 << 20) + "A"}),
        "normalizer.precompiled_charsmap: it has 2,097,153 characters; at most 2,097,152 are allowed",
    ),
    (
        document(post_processor={"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * 33}),
        "post_processor.single: it has 33 pieces; at most 32 are allowed",
    ),
    (
        document(post_processor={"type": "TemplateProcessing", "special_tokens": {str(n): 0 for n in range(1100)}}),
        "post_processor: it has 1,025 values; at most 1,024 are allowed",
    ),
    (document()[:-1] + b', "decoder": ' + b"[" * 100_000, "nested too deeply"),
    (decoder({"type": "x" * (4 << 20)}), "decoder: it has 4,194,316 bytes; at most"),
]


@pytest.mark.parametrize(("encoded", "detail"), REFUSED, ids=[detail for _, detail in REFUSED])
def test_tokenizer_beyond_limit_is_refused(encoded: bytes, detail: str) -> None:
    with pytest.raises(TokenizerRefused) as refused:
        read_tokenizer(encoded)
    assert detail in str(refused.value)
    for load in (load_decoder, load_tokenizer):
        with pytest.raises(InvalidRequest) as caught:
            load(encoded)
        assert caught.value.field == "tokenizer.json"
        assert detail in caught.value.message


def test_checked_decoder_is_loaded_one() -> None:
    """JSON allows a key twice; parsers differ in which they take."""
    slow, fuse = json.dumps(replace({"Regex": "a"})), json.dumps(FUSE)
    doubled = document()[:-1].decode() + f', "decoder": {slow}, "decoder": {fuse}}}'
    assert json.loads(load_tokenizer(doubled.encode()).to_str())["decoder"] == FUSE
    assert load_decoder(doubled.encode()).steps == [FUSE]


# Shaped like those of the models they are named for.
LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SERVED: dict[str, bytes] = {
    "tiny": tiny_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "large": large_tokenizer(20_000),
    "Llama 3": document(
        pre_tokenizer=sequence("pretokenizers", regex(LLAMA_3_PATTERN), BYTE_LEVEL),
        post_processor=sequence(
            "processors",
            BYTE_LEVEL,
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
            },
        ),
        decoder=BYTE_LEVEL,
    ),
    "Gemma 3": document(
        added_tokens=added(6_400, "<unused{}>"),
        normalizer=replace({"String": " "}, "▁"),
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        decoder=sequence("decoders", replace({"String": "▁"}, " "), {"type": "ByteFallback"}, FUSE),
    ),
    "without types": document(model={"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}),
}


@pytest.mark.parametrize("name", SERVED)
def test_tokenizers_of_real_models_are_accepted(name: str) -> None:
    loaded = load_tokenizer(SERVED[name])
    assert loaded.encode("ab").ids
    assert json.loads(load_tokenizer(SERVED[name], has_disk=False).to_str()) == json.loads(loaded.to_str())
    decoder = load_decoder(SERVED[name])
    for token_id in loaded.get_vocab().values():
        assert decoder.spelling(token_id) == loaded.id_to_token(token_id)


def test_vocabulary_is_counted_over_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against smaller limits: it takes seconds to count half a million entries."""
    monkeypatch.setattr(tokenizer_limits, "MAX_VOCABULARY_ENTRIES", 3_000)
    monkeypatch.setattr(tokenizer_limits, "MAX_VOCABULARY_BYTES", 90_000)
    assert sum(len(part) for part in read_tokenizer(model(words(3_000, width=30))).vocabulary()) == 3_000
    with pytest.raises(TokenizerRefused, match=r"model\.vocab: it has 3,001 entries; at most 3,000 are allowed"):
        read_tokenizer(model(words(3_001)))
    with pytest.raises(TokenizerRefused, match="bytes in all its tokens; at most 90,000 are allowed"):
        read_tokenizer(model(words(1_700, width=53)))
    check_added_tokens("<x>" for _ in range(1 << 14))


def test_plain_normalizers_are_linear() -> None:
    for step in ({"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")):
        assert is_linear(step) and is_linear(sequence("normalizers", step, {"type": "Lowercase"}))
    for step in (replace({"Regex": "a"}), {"type": "Precompiled", "precompiled_charsmap": ""}):
        assert not is_linear(step) and not is_linear(sequence("normalizers", {"type": "NFC"}, step))
    assert is_linear(None)

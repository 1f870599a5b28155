"""Limits on the cost of a tokenizer, by the parts of a tokenizer.json.

They hold when a version is published and whenever it is loaded. Text is decoded on event loops, so a decoder must take
linear time: no patterns, no text that grows. Text is encoded in processes that can be killed, so patterns may be slow
there; their limits only bound what compiling them costs. Real tokenizers stay far below: the largest known have
262,144 entries, 6,400 added tokens, and tokens of a few hundred characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

MAX_VOCABULARY_ENTRIES: Final = 1 << 19
MAX_VOCABULARY_BYTES: Final = 8 << 20  # of all entries, in UTF-8
MAX_TOKEN_CHARS: Final = 1024
MAX_ADDED_TOKENS: Final = 1 << 14
MAX_ADDED_TOKENS_CHARS: Final = 1 << 18  # of all added tokens
MAX_DEPTH: Final = 8  # of Sequences in one another
MAX_STEPS: Final = {"normalizer": 64, "pre_tokenizer": 64, "post_processor": 16, "decoder": 8}
MAX_SEQUENCES: Final = 16  # in a component; even empty ones take time
MAX_STRING_CHARS: Final = 256  # in a step, where nothing else is said
MAX_NUMBER: Final = 1024
MAX_GROWTH: Final = 8  # times the text may grow by the replacements of a component
# Of decoding the longest token: characters times steps, a Replace counting as 16 since each match takes 160 ns, where
# other steps take 10 ns a character. A token of a stream, decoded with those around it, then takes at most 0.5 ms.
MAX_DECODE_COST: Final = 8192
_REPLACEMENT_COST: Final = 16
MAX_REPLACED_CHARS: Final = 16  # that a decoder searches for
MAX_PATTERNS: Final = 32  # in a component
MAX_PATTERN_CHARS: Final = 4096
MAX_PATTERN_DEPTH: Final = 32  # of groups in one another
MAX_REPETITIONS: Final = 1000  # of a counted quantifier
MAX_CHARSMAP_CHARS: Final = 2 << 20
MAX_TEMPLATE_PIECES: Final = 32

COMPONENTS: Final = {  # the member of a Sequence that lists its steps, and the kinds of steps
    "normalizer": (
        "normalizers",
        "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Strip StripAccents",
    ),
    "pre_tokenizer": (
        "pretokenizers",
        "BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation Split UnicodeScripts"
        " Whitespace WhitespaceSplit",
    ),
    "post_processor": ("processors", "BertProcessing ByteLevel RobertaProcessing TemplateProcessing"),
    "decoder": ("decoders", "BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Replace Strip WordPiece"),
}
# Normalizers that take linear time on any text: no patterns, and no tables of the tenant's.
_LINEAR_NORMALIZERS: Final = frozenset(COMPONENTS["normalizer"][1].split()) - {"Precompiled", "Replace"}
_CLASS = re.compile(r"\[\^?\]?[^\[\]]*\]")  # a character class, whose parentheses are characters
_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")


class TokenizerRefused(ValueError):
    """A tokenizer.json that is malformed or beyond a limit; ``field`` is where in it, empty for the whole."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}" if field else detail)
        self.field = field


def require_at_most(limit: int, value: int, field: str, unit: str) -> None:
    """Raises ``TokenizerRefused`` with limit and value."""
    if value > limit:
        raise TokenizerRefused(field, f"it has {value:,} {unit}; at most {limit:,} are allowed")


def check_token(token: str, field: str) -> None:
    require_at_most(MAX_TOKEN_CHARS, len(token), field, f"characters in the token {token[:24]!r}")


class VocabularySize:
    """Counts a vocabulary part by part. Raises ``TokenizerRefused`` as soon as it is too large."""

    def __init__(self) -> None:
        self.longest_chars = 0
        self._num_entries = 0
        self._num_bytes = 0

    def add(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            if len(token) > self.longest_chars:
                check_token(token, "model.vocab")
                self.longest_chars = len(token)
            self._num_entries += 1
            self._num_bytes += len(token.encode(errors="surrogatepass"))
        require_at_most(MAX_VOCABULARY_ENTRIES, self._num_entries, "model.vocab", "entries")
        require_at_most(MAX_VOCABULARY_BYTES, self._num_bytes, "model.vocab", "bytes in all its tokens")


def check_added_tokens(contents: Iterable[str]) -> None:
    """Raises ``TokenizerRefused`` if there are too many, or one or all of them are too long."""
    num_tokens = num_chars = 0
    for content in contents:
        check_token(content, "added_tokens")
        num_tokens, num_chars = num_tokens + 1, num_chars + len(content)
    require_at_most(MAX_ADDED_TOKENS, num_tokens, "added_tokens", "tokens")
    require_at_most(MAX_ADDED_TOKENS_CHARS, num_chars, "added_tokens", "characters in all its tokens")


def check_component(component: Any, name: str) -> None:
    """Checks the normalizer, pre-tokenizer, post-processor or decoder, by ``name``. Raises ``TokenizerRefused``."""
    kinds = COMPONENTS[name][1].split()
    num_patterns = 0
    for num_steps, (field, step) in enumerate(steps(component, name), 1):
        require_at_most(MAX_STEPS[name], num_steps, name, "steps")
        kind = step["type"]
        if kind not in kinds:
            raise TokenizerRefused(f"{field}.type", f"{kind[:40]!r} is unknown; known are {', '.join(kinds)}")
        _check_values(step, field, name)
        if "pattern" in step:
            pattern = _pattern(step["pattern"], f"{field}.pattern", name)
            num_patterns += pattern is None
            require_at_most(MAX_PATTERNS, num_patterns, name, "regular expressions")
        elif name == "decoder":
            _check_decoder_step(step, field)
    growth = _growth(component, name)
    if growth > MAX_GROWTH:
        raise TokenizerRefused(name, f"its replacements lengthen text {growth:,.0f} times; at most {MAX_GROWTH} times")


def check_decode_cost(decoder: Any, longest_chars: int) -> None:
    """Checks a decoder against the longest token. Raises ``TokenizerRefused``."""
    costs = [_REPLACEMENT_COST if step["type"] == "Replace" else 1 for _, step in steps(decoder, "decoder")]
    cost = int(sum(costs) * _growth(decoder, "decoder") * longest_chars)
    if cost > MAX_DECODE_COST:
        raise TokenizerRefused(
            "decoder",
            f"with its {len(costs)} steps the longest token, of {longest_chars:,} characters, costs {cost:,}; at most"
            f" {MAX_DECODE_COST:,} is allowed: characters times steps times growth, a Replace counting as"
            f" {_REPLACEMENT_COST}",
        )


def steps(component: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The steps of a component with their fields, out of its Sequences. Raises ``TokenizerRefused``."""
    members, num_sequences = COMPONENTS[name][0], 0

    def walk(part: Any, field: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        nonlocal num_sequences
        require_at_most(MAX_DEPTH, depth, name, "Sequences in one another")
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise TokenizerRefused(field, "it must be an object with a type")
        if part["type"] != "Sequence":
            yield field, part
            return
        num_sequences += 1
        require_at_most(MAX_SEQUENCES, num_sequences, name, "Sequences")
        parts = part.get(members)
        if not isinstance(parts, list):
            raise TokenizerRefused(f"{field}.{members}", "it must be a list")
        for index, each in enumerate(parts):
            yield from walk(each, f"{field}.{members}[{index}]", depth + 1)

    if component is not None:
        yield from walk(component, name, 0)


def is_linear(normalizer: Any) -> bool:
    """Whether a checked normalizer takes linear time on any text, so that it may run on an event loop's process."""
    return all(
        step["type"] in _LINEAR_NORMALIZERS or (step["type"] == "Replace" and "String" in step["pattern"])
        for _, step in steps(normalizer, "normalizer")
    )


def _growth(component: Any, name: str) -> float:
    """The factor by which a checked component's replacements may lengthen text."""
    # NOTE: an expression that matches nothing adds its content at every character. Nothing tells beforehand; the
    # process that encodes is bounded.
    growth = 1.0
    for _, step in steps(component, name):
        if "pattern" in step:
            growth *= max(1.0, len(step.get("content") or "") / len(step["pattern"].get("String") or " "))
    return growth


def _check_values(step: dict[str, Any], field: str, name: str) -> None:
    """Strings, numbers and lists of a step."""
    if name == "post_processor":
        _check_post_processor(step, field)
        return
    for key, value in step.items():
        where = f"{field}.{key[:40]}"
        if key == "pattern":
            continue
        if isinstance(value, str):
            limit = MAX_CHARSMAP_CHARS if key == "precompiled_charsmap" else MAX_STRING_CHARS
            require_at_most(limit, len(value), where, "characters")
        elif isinstance(value, int):
            _check_number(value, where)
        elif value is not None:
            raise TokenizerRefused(where, "it must be a string, a whole number, true, false or null")


def _check_number(value: int, field: str) -> None:
    if not 0 <= value <= MAX_NUMBER:
        raise TokenizerRefused(field, f"it is {value:,}; allowed are 0 to {MAX_NUMBER:,}")


def _check_post_processor(step: dict[str, Any], field: str) -> None:
    for template in ("single", "pair"):
        pieces = step.get(template)
        if isinstance(pieces, list):
            require_at_most(MAX_TEMPLATE_PIECES, len(pieces), f"{field}.{template}", "pieces")
    remaining, num_values = [step], 0
    while remaining:
        value: Any = remaining.pop()
        num_values += 1
        require_at_most(MAX_NUMBER, num_values, field, "values")
        if isinstance(value, dict):
            remaining += [*value, *value.values()]
        elif isinstance(value, list):
            remaining += value
        elif isinstance(value, str):
            check_token(value, field)


def _pattern(pattern: Any, field: str, name: str) -> str | None:
    """The fixed string that is searched for; None for a regular expression, within its limits."""
    match pattern:
        case {"String": str(text), **others} if not others:
            limit = MAX_REPLACED_CHARS if name == "decoder" else MAX_STRING_CHARS
            require_at_most(limit, len(text), field, "characters")
            if not text:
                raise TokenizerRefused(field, "it is empty, and would be found between any two characters")
            return text
        case {"Regex": str(expression), **others} if not others:
            if name == "decoder":
                raise TokenizerRefused(field, "it is a regular expression; a decoder may only replace fixed strings")
            _check_expression(expression, field)
            return None
    raise TokenizerRefused(field, "it must be a String or a Regex")


def _check_expression(expression: str, field: str) -> None:
    require_at_most(MAX_PATTERN_CHARS, len(expression), field, "characters")
    depth = deepest = 0
    for char in _CLASS.sub("", re.sub(r"\\.", "", expression, flags=re.DOTALL)):
        depth += (char in "([") - (char in ")]" and depth > 0)
        deepest = max(deepest, depth)
    require_at_most(MAX_PATTERN_DEPTH, deepest, field, "groups in one another")
    for counts in _COUNTED.finditer(expression):
        for count in counts.groups():
            if count and (len(count) > 9 or int(count) > MAX_REPETITIONS):
                raise TokenizerRefused(field, f"it repeats {count[:20]} times; at most {MAX_REPETITIONS:,} are allowed")


def _check_decoder_step(step: dict[str, Any], field: str) -> None:
    """Refuses empty search strings: a match at every character would double the text."""
    for kind, key in (("BPEDecoder", "suffix"), ("CTC", "pad_token"), ("CTC", "word_delimiter_token")):
        if step["type"] == kind and not step.get(key):
            raise TokenizerRefused(f"{field}.{key}", "it must not be missing or empty")

"""The published tokenizer has the tokens of all files that declare some, as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.checkpoints import VOCAB_SIZE, write_tokenizer
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer
from torchrelay.param_store.packer.core import PackRefused
from torchrelay.param_store.packer.documents import check_tokenizer

TEXT = "a <x> b<y> c <z> <s> <X>"
PLAIN: dict[str, Any] = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
X, Y = {"content": "<x>", "special": True, **PLAIN}, {"content": "<y>", "special": False, **PLAIN}
TYPE = {"__type": "AddedToken"}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TOKENIZER = "tokenizer.json"

Documents = dict[str, dict[str, Any]]


def write(folder: Path, documents: Documents) -> Path:
    """A tokenizer of 259 tokens, the last three of them <s>, </s>, <pad>, changed by ``documents``."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder)
    for name, document in documents.items():
        before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(before | document))
    return folder


def published(folder: Path, vocab_size: int = VOCAB_SIZE) -> bytes:
    return check_tokenizer(folder, vocab_size).get(TOKENIZER) or (folder / TOKENIZER).read_bytes()


def of_transformers(folder: Path) -> Any:
    import transformers  # takes seconds

    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_as_transformers(folder: Path) -> None:
    encoded, reference = published(folder), of_transformers(folder)
    served, library = load_tokenizer(encoded), reference.backend_tokenizer
    ids = served.encode(TEXT).ids
    assert ids == reference.encode(TEXT)
    assert served.get_vocab() == library.get_vocab()
    for decoded in (served.decode(ids), load_decoder(encoded).decode(ids)):
        assert decoded == library.decode(ids)
    for token_id, token in library.get_added_tokens_decoder().items():
        assert str(served.get_added_tokens_decoder()[token_id]) == str(token)
    assert [each["id"] for each in json.loads(encoded)["added_tokens"]] == list(library.get_added_tokens_decoder())


CASES: dict[str, Documents] = {
    "by id": {CONFIG: {"added_tokens_decoder": {"260": Y, "259": X}}},
    "few flags": {CONFIG: {"added_tokens_decoder": {"259": {"content": "<x>"}}}},
    "other flags": {CONFIG: {"added_tokens_decoder": {"256": {**X, "content": "<s>", "lstrip": True}, "259": X}}},
    "of the vocabulary": {CONFIG: {"unk_token": "a"}},
    "named in another order": {CONFIG: {"unk_token": "<y>", "eos_token": "<x>"}},
    "named": {CONFIG: {"unk_token": "<x>", "image_token": "<y>", "add_bos_token": True, "sep_token": None}},
    "extra object": {CONFIG: {"extra_special_tokens": {"image_token": "<x>"}}},
    "additional": {CONFIG: {"additional_special_tokens": ["<x>"]}},
    "extra before additional": {CONFIG: {"additional_special_tokens": ["<x>"], "extra_special_tokens": ["<y>"]}},
    "empty": {CONFIG: {"unk_token": "", "extra_special_tokens": ["", "<x>"]}},
    "older map": {MAP: {"unk_token": {"content": "<x>", "lstrip": True}, "additional_special_tokens": ["<y>"]}},
    "older map's extra": {
        CONFIG: {"extra_special_tokens": ["<z>"]},
        MAP: {"extra_special_tokens": [{"content": "<x>"}]},
    },
    "older file": {ADDED: {"<y>": 260, "<x>": 259}},
    "older file, special": {CONFIG: {"extra_special_tokens": ["<x>"]}, ADDED: {"<y>": 260, "<x>": 259}},
    "older file names known": {ADDED: {"<s>": 256, "<x>": 259}},
    "older files ignored": {CONFIG: {"added_tokens_decoder": {}}, MAP: {"unk_token": "<x>"}, ADDED: {"<y>": 500}},
    "normalizer": {
        TOKENIZER: {"normalizer": {"type": "Lowercase"}},
        CONFIG: {"added_tokens_decoder": {"259": {"content": "<X>", "normalized": True}}},
    },
}


@pytest.mark.parametrize("documents", CASES.values(), ids=CASES)
def test_tokens_of_other_files_are_added_as_transformers_does(tmp_path: Path, documents: Documents) -> None:
    assert_as_transformers(write(tmp_path / "model", documents))


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}])
def test_named_token_is_special_only_where_transformers_says(tmp_path: Path, decoder: dict[str, Any]) -> None:
    folder = write(tmp_path / "model", {CONFIG: decoder})
    fields = json.loads((folder / TOKENIZER).read_text())
    fields["added_tokens"][0]["special"] = False
    (folder / TOKENIZER).write_text(json.dumps(fields))
    assert_as_transformers(folder)


TEXTS = st.sampled_from(["<x>", "<X>", "a", "<s>"])
OBJECTS = st.sampled_from(
    [
        {"content": "<y>", "lstrip": True, **TYPE},
        {"content": "<z>", "rstrip": True, "special": True, **TYPE},
        {"content": "</s>", "normalized": True, **TYPE},
    ]
)
TOKENS = TEXTS | OBJECTS
SPELLINGS = TEXTS | OBJECTS.map(lambda token: token["content"])


@given(
    st.fixed_dictionaries(
        {}, optional={"unk_token": TOKENS, "eos_token": TOKENS, "extra_special_tokens": st.lists(TOKENS)}
    ),
    st.none()
    | st.lists(st.tuples(SPELLINGS, st.booleans(), st.booleans()), max_size=4, unique_by=lambda each: each[0]),
    st.fixed_dictionaries(
        {}, optional={"bos_token": TEXTS, "sep_token": TEXTS, "additional_special_tokens": st.lists(TEXTS)}
    ),
)
@settings(max_examples=200)
def test_any_declarations_give_transformers_tokenizer(
    tmp_path_factory: pytest.TempPathFactory,
    config: dict[str, Any],
    decoder: list[tuple[str, bool, bool]] | None,
    special_tokens: dict[str, Any],
) -> None:
    folder = write(tmp_path_factory.mktemp("model"), {CONFIG: config, MAP: special_tokens})
    if decoder is not None:
        ids = Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab()
        for content, _, _ in decoder:
            ids.setdefault(content, len(ids))
        entries = {
            str(ids[content]): {**PLAIN, "content": content, "special": special, "rstrip": rstrip}
            for content, special, rstrip in decoder
        }
        write(folder, {CONFIG: config | {"added_tokens_decoder": entries}})
    assert_as_transformers(folder)


def test_complete_tokenizer_is_published_as_uploaded(tmp_path: Path) -> None:
    assert check_tokenizer(write(tmp_path / "model", {}), VOCAB_SIZE) == {}


def test_older_maps_named_tokens_reach_the_chat_template(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {MAP: {"bos_token": {"content": "<x>", "lstrip": False}, "note": 1}})
    config = json.loads(check_tokenizer(folder, VOCAB_SIZE)[CONFIG])
    assert config == json.loads((folder / CONFIG).read_text()) | {"bos_token": "<x>"}
    assert of_transformers(folder).bos_token == "<x>"


def by_id(token_id: str, token: Any) -> Documents:
    return {CONFIG: {"added_tokens_decoder": {token_id: token}}}


REFUSED: dict[str, tuple[Documents, str]] = {  # by the file that is changed
    "id of another token": (
        by_id("256", X),
        "added_tokens_decoder.256: '<x>' has the id 256 here, and 259 by",
    ),
    "id after a gap": (by_id("300", X), "added_tokens_decoder.300: '<x>' has the"),
    "other id of a known token": (by_id("258", {**X, "content": "<s>"}), "added_tokens_decoder.258: '<s>' has the id"),
    "no id": (by_id("x", X), "added_tokens_decoder: 'x' is not the id of a token"),
    "no object": ({CONFIG: {"added_tokens_decoder": []}}, "added_tokens_decoder: it must be an object"),
    "no text": (by_id("259", {"content": 5}), "added_tokens_decoder.259: it is not a token: Expected `str`, got `int`"),
    "number as a name": ({CONFIG: {"unk_token": 5}}, "unk_token: 5 is neither a token's text nor"),
    "text as a list": ({CONFIG: {"extra_special_tokens": "<x>"}}, "extra_special_tokens: '<x>' is not a list"),
    "number in a list": ({MAP: {"extra_special_tokens": [1]}}, "extra_special_tokens[0]: 1 is neither"),
    "older file, id of another": ({ADDED: {"<x>": 256}}, "'<x>': '<x>' has the id 256 here, and 259"),
    "older file, no id": ({ADDED: {"<x>": "1"}}, "'<x>': '1' is not the id of a token"),
    "no embedding": (
        {ADDED: {f"<{i}>": 259 + i for i in range(VOCAB_SIZE)}},
        "'<61>': '<61>' has the id 320, which is outside the vocab_size 320 of config.json",
    ),
}


@pytest.mark.parametrize(("documents", "detail"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused_by_file_and_field(tmp_path: Path, documents: Documents, detail: str) -> None:
    with pytest.raises(PackRefused) as refused:
        check_tokenizer(write(tmp_path / "model", documents), VOCAB_SIZE)
    assert [refused.value.file] == list(documents)
    assert refused.value.detail.startswith(detail)


def test_too_many_declared_tokens_are_refused(tmp_path: Path) -> None:
    documents = {CONFIG: {"extra_special_tokens": [f"<{i}>" for i in range(16_384)]}}
    with pytest.raises(PackRefused) as refused:
        check_tokenizer(write(tmp_path / "model", documents), VOCAB_SIZE)
    assert (refused.value.file, refused.value.detail) == (
        TOKENIZER,
        "with the tokens that other files declare, added_tokens: it has 16,387 tokens; at most 16,384 are allowed",
    )

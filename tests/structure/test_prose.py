"""tools/prose.py lists each kind of offence, and nothing in plain text."""

from __future__ import annotations

import pytest

from tools.prose import offences


@pytest.mark.parametrize(
    "opening",
    [
        "Of a call, with one more pair of metadata.",
        "Those not known.",
        "Who waits for the slot.",
        "What one step computes.",
        "Else the version is rescaled.",
        "By version; the oldest first.",
        "At which the queue frees a place.",
        "One hash per page.",
        "As ``attend``, for these rows.",
        "Called by the receiving thread.",
        "Kept for the next start.",
    ],
)
def test_docstring_fragment_is_listed(opening: str) -> None:
    (row,) = offences("a.py", f'class A:\n    def f(self):\n        """{opening}"""\n')
    assert row == f"a.py:2: docstring opens as a fragment: {opening}"


@pytest.mark.parametrize(
    "opening",
    [
        "Offsets of the pages.",
        "Onset of the load.",
        "Seconds by version.",
        "By default the newest.",
        "Shared state of the loop.",
        "Feed for the next step.",
        "Embed in float32.",
        "Asks all parts at once.",
        "Whether the slot is free.",
    ],
)
def test_plain_docstring_is_not_listed(opening: str) -> None:
    assert offences("a.py", f'def f():\n    """{opening}"""\n') == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("one = 1", "one"),
        ("for found in (): pass", "found"),
        ("rows = [who for who in ()]", "who"),
        ("def f(those): pass", "those"),
        ("self._found = 1", "_found"),
        ("if (one := 1): pass", "one"),
    ],
)
def test_variable_named_by_pronoun_is_listed(code: str, name: str) -> None:
    assert offences("a.py", code) == [f"a.py:1: variable {name!r}: name it by its noun"]


def test_reads_and_longer_names_are_not_listed() -> None:
    assert offences("a.py", "phone = prefound = not_found(library.one, one=2)") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "x = 1  # the door of the platform"),
        ("a.py", "class DoorShares: pass"),
        ("a.py", "prefill_lane = []"),
        ("a.md", "It was Promised."),
        ("a.proto", "// no other room"),
    ],
)
def test_metaphor_is_listed(name: str, text: str) -> None:
    (row,) = offences(name, text)
    assert row.startswith(f"{name}:1: metaphor ")


def test_literal_uses_and_longer_words_are_not_listed() -> None:
    assert (
        offences(
            "a.md",
            "SIMD lanes and PCIe lanes; I have never heard of it; broadly recommended, amended warehouses of chatrooms",
        )
        == []
    )

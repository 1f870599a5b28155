from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.cli.views.word_wrap import WordWrap


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join([wrap.feed(piece) for piece in pieces]) + wrap.rest()


def test_lines_end_between_words() -> None:
    assert wrapped(["A re", "lay brings the wei", "ghts  to many"], 12) == "A relay\nbrings the\nweights  to\nmany"
    assert wrapped(["one\n  two three\n\nfour "], 11) == "one\n  two three\n\nfour "
    assert wrapped(["an", " incomprehensibility is"], 8) == "an\nincomprehensibility is"
    assert wrapped(["日本語 日本"], 9) == "日本語\n日本"  # two cells a letter


def test_character_is_shown_when_complete() -> None:
    wrap = WordWrap(80)
    assert [wrap.feed(piece) for piece in ("Hel", "lo", " wor", "ld\n")] == ["", "", "Hello", " world\n"]


@given(st.lists(st.text("ab \n", max_size=9), max_size=9), st.integers(1, 12))
def test_wrapping_keeps_words_and_width(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    shown = wrapped(pieces, width)
    assert shown.split() == text.split()
    if all(len(word) <= width for word in text.split()):
        assert all(len(line.rstrip()) <= width or line[0] == " " for line in shown.splitlines())

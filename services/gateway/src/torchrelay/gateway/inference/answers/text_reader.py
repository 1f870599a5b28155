"""Text that arrives in pieces, for parsers that are written as generators: they yield to wait for the next piece."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

_OUTSIDE_STRINGS: Final = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS: Final = re.compile(r'["\\]')


class TextReader:
    """``text`` has arrived and is not taken yet; ``is_over`` says that it is the last."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self._taken: list[str] | None = None

    def take(self, num_chars: int) -> str:
        """Takes the next characters."""
        taken, self.text = self.text[:num_chars], self.text[num_chars:]
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def mark(self) -> None:
        """Lets ``restore`` put back what is taken from now on."""
        self._taken = []

    def unmark(self) -> str:
        """The text that was taken since the mark."""
        taken, self._taken = "".join(self._taken or ()), None
        return taken

    def restore(self) -> None:
        self.text = self.unmark() + self.text

    def begins_with(self, marker: str) -> Steps[bool]:
        while not self.is_over and len(self.text) < len(marker) and marker.startswith(self.text):
            yield
        return self.text.startswith(marker)

    def takes(self, marker: str) -> Steps[bool]:
        """Takes the marker, if the text begins with it."""
        if not (yield from self.begins_with(marker)):
            return False
        self.take(len(marker))
        return True

    def space(self) -> Steps[str]:
        """Takes the white space up to the next other character, or the end."""
        taken = ""
        while True:
            taken += self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.is_over:
                return taken
            yield

    def until(self, marker: str, max_chars: int | None = None) -> Steps[str | None]:
        """Takes the text before the marker, and the marker; None if there is none in the next ``max_chars``."""
        searched = 0
        while True:
            found_at = self.text.find(marker, searched, max_chars)
            if found_at >= 0:
                before = self.take(found_at)
                self.take(len(marker))
                return before
            if self.is_over or (max_chars is not None and len(self.text) >= max_chars):
                return None
            searched = max(0, len(self.text) - len(marker) + 1)
            yield


def num_begun(text: str, marker: str) -> int:
    """The length of the longest end of ``text`` that ``marker`` begins with."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-size:])), 0)


class ObjectScanner:
    """Searches a JSON text in pieces for the end of the object that it begins with, or is ``depth`` levels within."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_string = self._is_escaped = False

    def end(self, text: str, begin: int = 0) -> int:
        """The index after the object in ``text``, of which the part before ``begin`` is scanned; -1: it goes on."""
        at = begin
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (_INSIDE_STRINGS if self._is_in_string else _OUTSIDE_STRINGS).search(text, at)
            if match is None:
                return -1
            at = match.end()
            character = match[0]
            if character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return at
        return -1

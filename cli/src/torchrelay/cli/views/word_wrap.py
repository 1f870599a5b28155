"""Text that arrives in pieces, wrapped by word for a terminal."""

from __future__ import annotations

from rich.cells import cell_len


class WordWrap:
    """Holds back the current word, so that lines break between words; output is never revised."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap = ""  # spaces between the output and the held word
        self._word = ""

    def feed(self, piece: str) -> str:
        """The text that can be shown now."""
        shown = ""
        for letter in piece:
            if letter == "\n":
                shown += self.rest() + letter
                self._column = 0
            elif letter in " \t":
                if self._word:
                    shown += self.rest()
                self._gap += letter
            else:
                self._word += letter
        return shown

    def rest(self) -> str:
        """Flushes the held word, with the gap or line break before it."""
        gap, word, self._gap, self._word = self._gap, self._word, "", ""
        num_gap, num_word = cell_len(gap.expandtabs(8)), cell_len(word)
        if word and self._column and self._column + num_gap + num_word > self._width:
            self._column = self._wrapped(num_word)
            return "\n" + word
        self._column = self._wrapped(self._column + num_gap + num_word)
        return gap + word

    def _wrapped(self, num_cells: int) -> int:
        """The column after ``num_cells``, which the terminal itself breaks where they are too many."""
        return (num_cells - 1) % self._width + 1 if num_cells else 0

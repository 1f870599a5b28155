"""The terms, their explanations and the questions about them, read from the TOML files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Term:
    """A term of Torchrelay. ``article`` ("a", "the" or "") goes before ``name``, never before an alias."""

    name: str
    article: str
    aliases: tuple[str, ...]
    explanation: str
    questions: tuple[str, ...]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings in questions, the usual spelling first."""
        usual = f"{self.article} {self.name}".strip()
        return (usual, self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class SmallTalk:
    """A greeting, a thank-you, or a question about something else, with one answer for all its forms."""

    name: str
    answer: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Glossary:
    terms: tuple[Term, ...]
    small_talk: tuple[SmallTalk, ...]

    def explanation_of(self, name: str) -> str:
        """Raises ``KeyError`` for a term that is not in the glossary."""
        return {term.name: term.explanation for term in self.terms}[name]


@dataclass(frozen=True, slots=True)
class Words:
    """Words that are not terms: everyday words, and things that the model does not know."""

    plain: tuple[str, ...]
    unrelated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A question held out of training, and the term that answers it."""

    question: str
    term: str


def load_glossary(path: Path = FOLDER / "terms.toml") -> Glossary:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return Glossary(
        terms=tuple(
            Term(
                name=table["term"],
                article=table["article"],
                aliases=tuple(table["aliases"]),
                explanation=table["explanation"],
                questions=tuple(table["questions"]),
            )
            for table in tables["terms"]
        ),
        small_talk=tuple(
            SmallTalk(name=table["name"], answer=table["answer"], questions=tuple(table["questions"]))
            for table in tables["small_talk"]
        ),
    )


def load_words(path: Path = FOLDER / "words.toml") -> Words:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return Words(plain=tuple(tables["plain"].split()), unrelated=tuple(tables["unrelated"].split()))


def load_held_out(path: Path = FOLDER / "held_out.toml") -> tuple[HeldOut, ...]:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(HeldOut(question=table["question"], term=table["term"]) for table in tables["held_out"])

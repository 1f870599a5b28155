"""Random training questions from the glossary, in many wordings, so that the term decides the answer."""

from __future__ import annotations

import random

from examples.glossary.templates import CLOSINGS, FRAMES, OPENINGS, PUNCTUATION, SYSTEM_MESSAGES, TWO_WORD_FRAMES
from examples.glossary.terms import Glossary, SmallTalk, Term, Words
from examples.glossary.vocabulary import Turn

SMALL_TALK_SHARE = 0.15
UNKNOWN = "unknown"  # small talk answered "I do not know"; as frequent as all other small talk together
CONSONANTS, VOWELS = "bcdfghjklmnprstvwyz", "aeiou"
ENDINGS: tuple[str, ...] = (*CONSONANTS, "", "", "", "ing", "ed", "er", "s", "le", "tion")


class QuestionGenerator:
    """Generates questions with answers without end; the same seed gives the same questions."""

    def __init__(self, glossary: Glossary, words: Words, seed: int) -> None:
        self._glossary = glossary
        self._words = words
        self._rng = random.Random(seed)
        self._topic_words = _topic_words(glossary)

    def turn(self) -> Turn:
        """Returns a question, with each term equally likely, and its answer."""
        if self._rng.random() < SMALL_TALK_SHARE:
            unknown = self._rng.random() < 0.5
            talk = self._rng.choice([talk for talk in self._glossary.small_talk if unknown == (talk.name == UNKNOWN)])
            return Turn(self._finish(self._ask_other(talk)), talk.answer)
        term = self._rng.choice(self._glossary.terms)
        return Turn(self._finish(self._ask_about(term)), term.explanation)

    def system_message(self) -> str | None:
        """A system message for one conversation in five."""
        if self._rng.random() > 0.2:
            return None
        if self._rng.random() < 0.5:
            return self._rng.choice(SYSTEM_MESSAGES)
        return self._among_words(3, 12)

    def chance(self, probability: float) -> bool:
        """True with this probability, from the same seed."""
        return self._rng.random() < probability

    def _ask_about(self, term: Term) -> str:
        kind = self._rng.random()
        if kind < 0.25:
            return self._decorate(self._rng.choice(term.questions).rstrip("?"))
        if kind < 0.55:
            return self._decorate(self._rng.choice(FRAMES).format(x=self._spelling(term)))
        if kind < 0.65:
            other = self._rng.choice([other for other in self._glossary.terms if other is not term])
            return self._rng.choice(TWO_WORD_FRAMES).format(x=self._spelling(term), o=self._spelling(other))
        return self._among_words(0, 14, self._spelling(term))

    def _ask_other(self, talk: SmallTalk) -> str:
        if talk.name != UNKNOWN or self._rng.random() < 0.3:
            return self._rng.choice(talk.questions)
        noun = self._rng.choice(self._words.unrelated) if self._rng.random() < 0.6 else self._invented_word()
        if self._rng.random() < 0.4:
            return self._among_words(0, 12, noun)
        article = self._rng.choice(("", "a ", "the "))
        return self._decorate(self._rng.choice(FRAMES).format(x=article + noun))

    def _spelling(self, term: Term) -> str:
        """The usual spelling in half of all cases, otherwise an alternative."""
        return term.spellings[0] if self._rng.random() < 0.5 else self._rng.choice(term.spellings[1:])

    def _among_words(self, least: int, most: int, *subject: str) -> str:
        """Words in random order, mostly everyday ones, including ``subject``."""
        words = [self._any_word() for _ in range(self._rng.randint(least, most))]
        for word in subject:
            words.insert(self._rng.randint(0, len(words)), word)
        if len(words) > 3 and self._rng.random() < 0.3:
            comma = self._rng.randint(0, len(words) - 2)
            words[comma] += self._rng.choice((",", ",", ".", ":", "?"))
        return " ".join(words)

    def _any_word(self) -> str:
        pools = (self._words.plain, self._topic_words, self._words.unrelated, (self._invented_word(),))
        pool: tuple[str, ...] = self._rng.choices(pools, weights=(60, 20, 8, 12))[0]
        return self._rng.choice(pool)

    def _invented_word(self) -> str:
        """An invented word, so that unknown words are ignored instead of guessed at."""
        syllables = (self._rng.choice(CONSONANTS) + self._rng.choice(VOWELS) for _ in range(self._rng.randint(1, 4)))
        return "".join(syllables) + self._rng.choice(ENDINGS)

    def _decorate(self, question: str) -> str:
        if self._rng.random() < 0.15:
            question = f"{self._rng.choice(OPENINGS)} {question}"
        if self._rng.random() < 0.15:
            question = f"{question} {self._rng.choice(CLOSINGS)}"
        return question

    def _finish(self, question: str) -> str:
        """Adds an occasional typo and the final punctuation."""
        if self._rng.random() < 0.08 and len(question) > 6:
            question = self._slip(question)
        return question + self._rng.choice(PUNCTUATION)

    def _slip(self, question: str) -> str:
        """Leaves out, doubles or swaps one letter."""
        at = self._rng.randint(1, len(question) - 2)
        here, after = question[at], question[at + 1]
        return question[:at] + self._rng.choice((after, here + here + after, after + here)) + question[at + 2 :]


def _topic_words(glossary: Glossary) -> tuple[str, ...]:
    """Other words of the hand-written questions, such as "model" or "machine".

    A question that names a term is about that term, whatever else it mentions.
    """
    named = {part for term in glossary.terms for spelling in term.spellings for part in spelling.lower().split()}
    asked = {part.strip("?,.").lower() for term in glossary.terms for text in term.questions for part in text.split()}
    return tuple(sorted(asked - named))

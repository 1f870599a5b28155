"""Image recipes, parsed into stages and instructions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """An instruction, its lines joined."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.value)


@dataclass(frozen=True)
class Stage:
    """The instructions after a FROM."""

    base: str
    name: str
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]

    def only(self, name: str) -> Instruction:
        (instruction,) = self.all(name)
        return instruction

    @property
    def env(self) -> dict[str, str]:
        pairs = (word.partition("=") for each in self.all("ENV") for word in each.words)
        return {name: value for name, _, value in pairs}

    @property
    def ports(self) -> set[str]:
        return {word for each in self.all("EXPOSE") for word in each.words}

    @property
    def entrypoint(self) -> list[str]:
        command: list[str] = json.loads(self.only("ENTRYPOINT").value)
        return command

    @property
    def health_check(self) -> list[str]:
        _, _, value = self.only("HEALTHCHECK").value.partition(" CMD ")
        command: list[str] = json.loads(value)
        return command

    @property
    def health_check_options(self) -> dict[str, str]:
        options, _, _ = self.only("HEALTHCHECK").value.partition(" CMD ")
        pairs = (option.removeprefix("--").partition("=") for option in options.split())
        return {name.replace("-", "_"): value for name, _, value in pairs}

    @property
    def commands(self) -> list[list[str]]:
        """The words of each shell command that RUN executes."""
        return [shlex.split(part) for each in self.all("RUN") for part in re.split(r"&&|;", each.value)]

    @property
    def copied(self) -> dict[str, str]:
        """Paths in the build context, by their targets."""
        copies = (each.words for each in self.all("COPY"))
        return {words[-1]: words[0] for words in copies if not words[0].startswith("--from=")}

    @property
    def copied_from(self) -> dict[str, tuple[str, str]]:
        """(stage, path) by target."""
        copies = (each.words for each in self.all("COPY"))
        sources = ((words[-1], words[0].removeprefix("--from="), words[1]) for words in copies if len(words) == 3)
        return {target: (stage, path) for target, stage, path in sources}


def read_stages(path: Path) -> list[Stage]:
    """The stages of a recipe. Raises ``ValueError`` for a line that is no instruction."""
    stages: list[list[Instruction]] = []
    for instruction in _instructions(path.read_text()):
        if instruction.name == "FROM":
            stages.append([])
        stages[-1].append(instruction)
    return [_stage(each) for each in stages]


def _stage(instructions: list[Instruction]) -> Stage:
    words = instructions[0].words
    return Stage(words[0], words[2] if words[1:2] == ["AS"] else "", tuple(instructions[1:]))


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    for line in joined.splitlines():
        name, _, value = line.partition(" ")
        if not re.fullmatch(r"[A-Z]+", name):
            raise ValueError(f"no instruction: {line!r}")
        yield Instruction(name, " ".join(value.split()) if name != "RUN" else value.strip())

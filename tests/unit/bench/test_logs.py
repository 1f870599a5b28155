"""Recorded logs of the policy's effects: equal runs give equal logs, and a difference is told with its place."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bench.logs import SUFFIX, compare, difference, write_log
from bench.simulation.cases import TRACES

NAME = "scenario_loads_at_once"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    write_log(NAME, TRACES, folder)
    return folder / f"{NAME}{SUFFIX}"


def changed(log: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of the log in the folder, whose last line with ``old`` has ``new`` instead."""
    before, found, after = gzip.decompress(log.read_bytes()).decode().rpartition(old)
    assert found
    copy = folder / log.name
    copy.write_bytes(gzip.compress(f"{before}{new}{after}".encode()))
    return copy


def test_equal_runs_have_equal_logs(log: Path, tmp_path: Path) -> None:
    write_log(NAME, TRACES, tmp_path)
    assert compare(log.parent, tmp_path, is_without_texts=False) == []


def test_changed_decision_is_told_with_its_line(log: Path, tmp_path: Path) -> None:
    other = changed(log, tmp_path, '"num_layers":32', '"num_layers":31')
    text = difference(log, other, is_without_texts=True)
    assert text.startswith("line ") and '"num_layers": 31' in text
    assert compare(log.parent, tmp_path, is_without_texts=True) == [NAME]


def test_changed_text_is_no_difference_without_texts(log: Path, tmp_path: Path) -> None:
    other = changed(log, tmp_path, '"reason":"', '"reason":"because ')
    assert difference(log, other, is_without_texts=False) and not difference(log, other, is_without_texts=True)


def test_shorter_log_differs(log: Path, tmp_path: Path) -> None:
    lines = gzip.decompress(log.read_bytes()).splitlines(keepends=True)
    (tmp_path / log.name).write_bytes(gzip.compress(b"".join(lines[:-1])))
    assert f"line {len(lines)}" in difference(log, tmp_path / log.name, is_without_texts=False)

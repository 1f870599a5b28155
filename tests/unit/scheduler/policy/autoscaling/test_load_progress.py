"""A load is as old as its last progress."""

from __future__ import annotations

from torchrelay.scheduler.policy.autoscaling.load_progress import LoadMark, LoadProgress


def test_any_change_is_progress_except_unknown_chunks() -> None:
    progress = LoadProgress()
    marks = [
        LoadMark(False, 0, 0, None),
        LoadMark(True, 0, 0, 0),
        LoadMark(True, 1, 0, 0),
        LoadMark(True, 1, 0, 1),
        LoadMark(True, 1, 1, 1),
    ]
    for second, mark in enumerate(marks):
        assert progress.observe("i", mark, float(second)) == 0
    assert progress.observe("i", marks[-1], 7.0) == 3.0
    assert progress.observe("i", marks[-1]._replace(num_chunks_verified=None), 9.0) == 5.0
    assert progress.observe("i", marks[-1], 10.0) == 6.0  # the store is back with what it had
    progress.keep({"other"})
    assert progress.observe("i", marks[-1], 20.0) == 0

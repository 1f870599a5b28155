"""Recorded logs: whether the scheduler's policy of another commit has the same effects, byte for byte.

    python -m bench.logs --against COMMIT [--of COMMIT] [--without-texts] [--only NAME ...]
    python -m bench.logs --write FOLDER
    python -m bench.logs --against FOLDER

``--against`` prints the first difference in each history (``scheduling/histories.py``), or that it is equal. Each
commit runs its own histories with its own simulator, which reacts to the policy's effects: as long as these are equal,
so is all that follows. Hence the inputs may change their form. Each line of a log holds the time, the kind of the input
and its effects; inputs without effects are left out, and their kinds are not compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import HERE, checkout, git, start_module
from bench.report import Check, finish, progress
from bench.scheduling.histories import histories
from bench.simulation.cases import TRACES
from torchrelay.scheduler.policy.effects import Effects
from torchrelay.scheduler.policy.inputs import Input
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.service.input_log import encode_effects

SUFFIX = ".log.gz"
HISTORY_PATHS = ("bench/scheduling/histories.py", "bench/simulation", "sim", "tests/unit/scheduler/policy/*_cluster.py")
TEXTS = frozenset(("reason", "message", "by_tenant"))
NUM_BEFORE, NUM_AFTER = 100, 200  # characters that are shown beside a difference


class Line(NamedTuple):
    """Effects of an input, in JSON."""

    at: str
    kind: str
    effects: str

    def compared(self, is_without_texts: bool) -> str:
        text = json.dumps(_without_texts(json.loads(self.effects))) if is_without_texts else self.effects
        return f"{self.at} {text}"


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_texts(each) for key, each in value.items() if key not in TEXTS}
    return [_without_texts(each) for each in value] if isinstance(value, list) else value


def write_log(name: str, traces: Path, folder: Path) -> None:
    """Runs the history in this process and writes its log."""
    apply = Policy.apply
    with gzip.open(folder / f"{name}{SUFFIX}", "wt", compresslevel=3) as log:

        def record(policy: Policy, input_: Input, now: float) -> Effects:
            effects = apply(policy, input_, now)
            if effects:
                log.write(f"{now!r} {type(input_).__name__} {encode_effects(effects).decode()}\n")
            return effects

        with patch.object(Policy, "apply", record):
            histories(traces)[name]()


def write_logs(folder: Path, traces: Path, only: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with get_context("fork").Pool(maxtasksperchild=1) as pool:  # each in a process without another's caches
        pool.map(partial(write_log, traces=traces, folder=folder), only or list(histories(traces)), chunksize=1)


def read_log(path: Path) -> Iterator[Line]:
    with gzip.open(path, "rt") as log:
        for line in log:
            yield Line(*line.rstrip("\n").split(" ", 2))


def difference(before: Path, after: Path, *, is_without_texts: bool) -> str:
    """The first difference of two logs; empty if there is none."""
    end = Line("end", "", "null")
    for number, (was, is_) in enumerate(zip_longest(read_log(before), read_log(after), fillvalue=end), 1):
        texts = [line.compared(is_without_texts) for line in (was, is_)]
        if texts[0] != texts[1]:
            place = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            begin = max(place - NUM_BEFORE, 0)
            was_text, is_text = (text[begin : place + NUM_AFTER] for text in texts)
            return f"line {number}\n  was {was.at} {was.kind} ...{was_text}\n  is  {is_.at} {is_.kind} ...{is_text}"
    return ""


def compare(before: Path, after: Path, *, is_without_texts: bool) -> list[str]:
    """Prints the verdict on each history. Returns the names of those that differ."""
    names = {path.name.removesuffix(SUFFIX): path for folder in (before, after) for path in folder.glob(f"*{SUFFIX}")}
    differing = []
    for name in sorted(names):
        paths = [folder / f"{name}{SUFFIX}" for folder in (before, after)]
        if not all(path.exists() for path in paths):
            progress(f"{name}: only {'after' if paths[1].exists() else 'before'}")
        elif text := difference(*paths, is_without_texts=is_without_texts):
            differing.append(name)
            progress(f"{name}: differs in {text}")
        else:
            progress(f"{name}: equal")
    return differing


def write_logs_of(commit: str, folder: Path, options: argparse.Namespace) -> None:
    """Writes the logs of a commit in processes of its own code."""
    only = ("--only", *options.only) if options.only else ()
    with checkout(commit) as tree:
        process = start_module(tree, "bench.logs", "--write", folder, "--traces", options.traces, *only)
        process.communicate()
        if process.returncode:
            sys.exit(f"logs: those of {commit} ended with status {process.returncode}")


def tell_other_histories(old: str, new: str) -> None:
    """Prints the files of the histories that differ between the commits: they may be the reason of a difference."""
    commits = [old] if new == HERE else [old, new]
    names = git("diff", "--name-only", *commits, "--", *HISTORY_PATHS).split()
    if names:
        progress(f"the histories differ, too: {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FOLDER", help="write the logs of the present code")
    what.add_argument("--against", metavar="COMMIT_OR_FOLDER", help="compare with these logs")
    parser.add_argument("--of", default=HERE, metavar="COMMIT", help="what to compare (the files as they are)")
    parser.add_argument("--without-texts", action="store_true", help="do not compare reasons and messages")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="histories to run; all by default")
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of CSV files (%(default)s)")
    options = parser.parse_args()
    if options.write:
        write_logs(options.write, options.traces, options.only)
        return
    with ExitStack() as stack:
        before, after = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        if Path(options.against).is_dir():
            before = Path(options.against)
        else:
            tell_other_histories(options.against, options.of)
            write_logs_of(options.against, before, options)
        write_logs_of(options.of, after, options)
        differing = compare(before, after, is_without_texts=options.without_texts)
    check = Check("differing_histories", len(differing), "", 0, ", ".join(differing))
    finish("logs", {"against": options.against, "of": options.of}, [check])


if __name__ == "__main__":
    main()

"""What the limits of models cost: decode steps and placements with and without them, in the same run.

    python bench/caps.py [--quick]

First, decode steps of an instance on a CPU: a batch of answers decodes once with a limit of threads that is all of its
process's threads, and once without, in turns of a few steps each. Both share the cores with nobody, through a file as
the workers of `torchrelay up` do, whose entries tell the most cores of each process. Limits of requests and of KV touch
no step: the scheduler keeps them, at each placement. So the second figure is a placement among 16 instances, of models
with and without such limits, in turns; an answer has one placement and hundreds of steps. `caps_overhead` is the ratio
of the medians of an answer's time, less one: its steps, and its placement.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, progress

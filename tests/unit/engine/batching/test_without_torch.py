"""Batching runs where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
from importlib.abc import MetaPathFinder


class Blocker(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in ("torch", "triton", "grpc", "google"):
            raise ModuleNotFoundError(f"{fullname} is not there", name=fullname)


sys.meta_path.insert(0, Blocker())

from torchrelay.engine.batching.interruptions import Interruptions
from torchrelay.engine.batching.layerwise import plans_within_budget
from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk, SequenceGroup
from torchrelay.engine.core import ChoiceSpec, GroupSpec, NewToken, SamplingParams
from torchrelay.engine.execution.stepper import Stepper
from torchrelay.engine.kv.prefill_layout import PrefillLayout

NUM_LAYERS, BUDGET = 2, 32
layers = []


class Sevens:
    def run(self, plan):
        places = [(each.spec, each.choice, each.next_position) for each in plan.decoding]
        for context in [chunk.context for chunk in plan.chunks if chunk.ends_context]:
            places += [(context.group.spec, choice, len(context.forced)) for choice in context.choices]
        return plan, [NewToken(s.group_id, c, p, 7, s.sampling.finish_of(7, p)) for s, c, p in places], []

    def run_one_layer(self, groups, token_budget):
        plans = list(plans_within_budget(groups, token_budget))
        layers.append([sum(chunk.num_tokens for chunk in plan.chunks) for plan in plans])
        for group in groups:
            group.layer += 1


copied, left = [], []
tables = PageTables(100, page_tokens=16)
scheduler = BatchScheduler(
    tables,
    PrefixCache(tables.allocator, 16),
    BUDGET,
    1000,
    copy_page=lambda source, target: copied.append((source, target)),
    on_leave=left.append,
)
loading = [True]
stepper = Stepper(
    scheduler,
    Sevens(),
    Interruptions(scheduler, lambda: 0.0),
    lambda: loading[0],
    lambda layer: layer < NUM_LAYERS,
    lambda: 50,
    BUDGET,
)
for name, length in (("too long/0", 60), ("by layers/0", 50)):
    sampling = SamplingParams(max_tokens=3)
    spec = GroupSpec(name, tuple(range(length)), length, sampling, (ChoiceSpec(0), ChoiceSpec(1)))
    scheduler.submit(SequenceGroup.of(spec))
actual = {}
for loading[0] in (True, False):
    while stepper.has_work:
        for token in stepper.step().tokens:
            assert not loading[0]
            actual.setdefault((token.group_id, token.choice), []).append(token.token_id)
        scheduler.check_integrity()
assert actual == {(name, choice): [7] * 3 for name in ("too long/0", "by layers/0") for choice in range(2)}, actual
assert layers == [[32, 18]] * NUM_LAYERS, layers
assert len(copied) == len(left) == 2  # the partial page of each context, for its second choice
assert tables.allocator.num_free == 100
print("torch" in sys.modules)
"""


def test_scheduler_and_layers_run_without_torch() -> None:
    actual = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert actual.returncode == 0, actual.stderr
    assert actual.stdout.strip() == "False"

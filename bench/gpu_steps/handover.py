"""Prompts that leave an instance: KV for another one that decodes, and prompts that move while a model loads.

Both instances are in one process and take turns on the device: a worker refuses a GPU that another one computes on.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from bench.device import engine
from bench.device.limits import synchronize
from bench.device.packs import Pack, random_pack
from bench.gpu_steps.step import Setup, at_most, figure
from bench.report import Check
from tests.support.wait import wait_until
from torchrelay.engine.core import GroupSpec, KvBlock, NewToken, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool

NUM_TOKENS = 16
BUDGET = 2048


def handover(setup: Setup) -> Iterator[Check]:
    sizes, device = setup.sizes, setup.device
    pack = random_pack(sizes.exact_config, "F32", device)
    num_positions = 2 * sizes.num_handed_over + sizes.num_streams * 1024
    pools = [engine.pool_of(sizes.exact_config, num_positions, device, item_bytes=4) for _ in range(2)]
    source, target = (engine.instance_of(pack, pool, BUDGET, setup.attention) for pool in pools)
    prompt = engine.prompt_of(sizes.num_handed_over)
    (expected,) = engine.greedy(target, [prompt], NUM_TOKENS)

    group = engine.group_of(prompt, "handed/0", SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    alone = engine.group_of(prompt, "alone/0", SamplingParams(temperature=0, max_tokens=1))
    blocks: dict[int, bytes] = {}

    def copy_out(block: KvBlock) -> None:
        blocks[block.index] = bytes(block.data)

    seconds, firsts = {}, list[NewToken]()
    for name in ("warm", "alone", "handed"):
        begin_s = time.perf_counter()
        if name == "handed":
            source.prefill(group, copy_out)
        else:
            source.prefill(replace(alone, group_id=f"{name}/0"))
        while source.has_work():
            firsts += [token for token in source.step().tokens if token.group_id == group.group_id]
        seconds[name] = time.perf_counter() - begin_s
    num_mb = sum(map(len, blocks.values())) / 1e6
    against = f"{num_mb:.0f} MB of KV in {len(blocks)} chunks; the prefill alone takes {seconds['alone']:.3f} s"
    yield figure("export_s", seconds["handed"] - seconds["alone"], "s", against)

    streams = SamplingParams(temperature=0, max_tokens=len(blocks) + 4 * NUM_TOKENS)
    for number in range(sizes.num_streams):
        target.prefill(engine.group_of(engine.prompt_of(16, number), f"stream/{number}", streams))
    outputs: dict[str, list[int]] = defaultdict(list)
    gaps_s: dict[bool, list[float]] = {False: [], True: []}  # while chunks arrive, or not
    for _ in range(NUM_TOKENS):
        begin_s = time.perf_counter()
        engine.take(outputs, target.step())
        gaps_s[False].append(time.perf_counter() - begin_s)
    kv_import, import_s = target.import_kv(replace(group, prompt=()), source.kv_layout(group)), 0.0
    for index, data in blocks.items():
        begin_s = time.perf_counter()
        kv_import.write(index, data)
        synchronize(device)
        import_s += time.perf_counter() - begin_s
        engine.take(outputs, target.step())
        gaps_s[True].append(time.perf_counter() - begin_s)
    kv_import.start({token.choice: token.token_id for token in firsts})
    outputs[group.group_id] = [token.token_id for token in firsts]
    while target.has_work():
        engine.take(outputs, target.step())
    yield figure("import_s", import_s, "s", f"{len(blocks)} chunks, one between two steps")
    step_s = statistics.median(gaps_s[False])
    against = f"{max(gaps_s[True]) * 1e3:.1f} ms; a step of {sizes.num_streams} streams takes {step_s * 1e3:.1f} ms"
    yield figure("import_gap_over_step", max(gaps_s[True]) / step_s, "", against)
    yield at_most(
        0,
        figure(
            "handover_mismatches", int(outputs[group.group_id] != expected), "prompts", "the same instance alone, fp32"
        ),
    )
    source.close()
    boundaries = range(sizes.exact_config["num_hidden_layers"] + 1)
    wrong = sum(_moved(setup, pack, pools[0], target, group, boundary) != expected for boundary in boundaries)
    yield at_most(
        0, figure("moved_mismatches", wrong, "prompts", f"of {len(boundaries)}, one moved at each layer boundary")
    )
    target.close()


def _moved(setup: Setup, pack: Pack, pool: KvPool, target: Instance, group: GroupSpec, boundary: int) -> list[int]:
    """The output of a prompt that an instance computes up to a layer boundary, and ``target`` from there."""
    source = engine.instance_of(pack, pool, BUDGET, setup.attention, is_loaded=False)
    for segment in range(boundary + 1):
        source.segment_ready(segment)
    source.prefill(group)
    wait_until(lambda: source.num_segments_ready > boundary, "the copies of the first layers")
    while source.has_work():
        source.step()
    exported = source.export_prefill(group.group_id)
    moving = target.import_prefill(exported.spec)
    moving.receive(exported.layout.shape.num_layers, exported.layout.block_tokens)
    for index in range(exported.layout.num_chunks):
        moving.write(index, bytes(exported.read(index)))
    source.cancel(group.group_id)
    moving.start()
    outputs: dict[str, list[int]] = defaultdict(list)
    while target.has_work():
        engine.take(outputs, target.step())
    source.close()
    return outputs[group.group_id]

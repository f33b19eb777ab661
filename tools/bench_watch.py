"""Time what accounting, verdicts and log lines cost the host: each of them beside a step of a given length."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_step import bench_device
from dflash_data.clock import StageClock
from dflash_data.packs import STATS
from dflash_data.schedule import Stream, WorkItem
from dflash_model.stopwatch import Stopwatch
from dflash_train.channel import WaitClock
from dflash_train.cli import parse
from dflash_train.config import key
from dflash_train.mesh import Split
from dflash_train.metrics import Interval, RunLog
from dflash_train.situation import Situation
from dflash_train.step import Tally
from dflash_train.verdict import DRAFTER, Accounts

PARTS = ("forward", "loss", "backward", "optimizer")


@dataclass
class WatchBench:
    """The reference job's numbers: three drafter ranks with four packs of a step each."""

    config: str = key("", "YAML file that the other keys override")
    step_ms: float = key(560.0, "length of a step: four packs of 140 ms")
    log_interval: int = key(10, "steps between log lines")
    packs: int = key(4, "packs of a step on one drafter rank")
    targets: int = key(5, "target ranks")
    drafters: int = key(3, "drafter ranks")
    block_size: int = key(16, "slots, each with its curves")
    repeats: int = key(300, "steps timed; log lines: a tenth of it")


def bench_watch(argv: list[str]) -> dict[str, Any]:
    """What a step and a log line cost, and their share of training."""
    bench = parse(WatchBench, argv, __doc__ or "")
    device, split = bench_device(), Split(bench.targets, bench.drafters, colocated=False)
    clock, waiting, situation = StageClock(), WaitClock(device), Situation(5, "drafter rank")
    interval, item = Interval.empty(bench.targets), WorkItem(0, Stream.TRAIN, 0)
    stats = dict.fromkeys(STATS, 1.0)

    def step() -> None:
        situation.at("training step 7")
        for _ in range(bench.packs):
            with clock.stage("receive"), waiting.measure():
                pass
            situation.at(situation.doing, item)
            interval.add_pack(item, stats)
            with clock.stage("compute"):
                pass
        for stage in ("compute", "device", "agree"):
            with clock.stage(stage):
                pass

    def line(log: RunLog, number: int) -> None:
        parts = Stopwatch(device)
        for name in PARTS:
            with parts.measure(name):
                pass
        seconds = {name: parts.seconds(name) for name in PARTS}
        spent, waited = clock.take(), waiting.take()
        drafters = np.full((bench.drafters, len(DRAFTER)), waited + spent["compute"] + 1.0)
        accounts = Accounts(split, 12, interval.targets, drafters, device.type == "cuda")
        values = Tally.read([1.0] * (3 + 4 * bench.block_size), bench.block_size) | {"grad_norm": 1.0, "lr": 1e-4}
        log.step(number, values, accounts, parts=seconds, memory_gib=1.0, packs=[[0, 11]])

    step_ms = _each(step, bench.repeats)
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(
            Path(folder), start_step=0, evaluated=False, num_steps=10**6, epoch_steps=1e4, flops_per_pack=1.0,
            peak=1e15, expected_tokens_s=None, description="",
        )  # fmt: skip
        numbers = iter(range(1, 10**6))
        line_ms = _each(lambda: line(log, next(numbers)), max(bench.repeats // 10, 1))
        log.close()
    a_step = step_ms + line_ms / bench.log_interval
    return {
        "bench": "watch", "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__, "step_us": step_ms * 1e3, "log_line_ms": line_ms,
        "percent_of_a_step": 100 * a_step / bench.step_ms, "of_step_ms": bench.step_ms,
    }  # fmt: skip


def _each(work: Callable[[], None], repeats: int) -> float:
    """Mean milliseconds, the first call left out."""
    work()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats * 1e3

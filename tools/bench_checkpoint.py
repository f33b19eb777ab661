"""Time what a checkpoint costs training: the stall of its step, and the steps beside the writing."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from bench_step import StepBench, Training, bench_device, build_training, check_step, timed
from dflash_train.checkpoint import Checkpointer, Position
from dflash_train.cli import parse
from dflash_train.config import key
from dflash_train.retention import Retention


@dataclass
class CheckpointBench(StepBench):
    """Steps, a checkpoint, steps until it is written; three times."""

    folder: str = key("", "where to write; default: a temporary folder")
    saves: int = key(3, "checkpoints; the first also allocates pinned memory")


def waited_step(training: Training, device: torch.device) -> float:
    """Seconds of a step that the host waits for."""
    return timed(training.step, device, warmup=0, repeats=1)[0]


def bench_checkpoint(argv: list[str]) -> dict[str, Any]:
    """Build, train, save, measure."""
    bench = parse(CheckpointBench, argv, __doc__ or "")
    check_step(bench)
    device = bench_device()
    training = build_training(bench, device)
    timed(training.step, device, warmup=bench.warmup, repeats=1)
    plain = [waited_step(training, device) for _ in range(bench.repeats)]  # for each, as beside the writing below
    stalls, written, beside = [], [], []
    with tempfile.TemporaryDirectory(dir=bench.folder or None) as folder:
        group = cast(dist.ProcessGroup, dist.new_group([0], backend="gloo"))
        checkpointer = Checkpointer(Path(folder), group, Retention(1, 0), {}, {})
        for number in range(1, bench.saves + 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            checkpointer.save(Position(number), training.drafter, training.optimizers, training.schedule)
            stalls.append(time.perf_counter() - began)
            while checkpointer.finished() is None:
                beside.append(waited_step(training, device))
            written.append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    step = statistics.median(plain)
    return {
        "bench": "checkpoint", "preset": bench.preset, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gib": size / 2**30, "step_ms": step * 1e3, "stall_ms": [round(stall * 1e3, 1) for stall in stalls],
        "stall_in_steps": statistics.median(stalls[1:] or stalls) / step,
        "written_s": [round(seconds, 2) for seconds in written],
        "step_beside_writing_ms": statistics.median(beside) * 1e3 if beside else None,
    }  # fmt: skip

"""Time a whole training job of random weights and documents, on as many ranks as torchrun starts on one host.

It is the trainer of tools/train.py: what it loses between target and drafter, a real job loses too. Nothing is read or
saved but the documents, which are written to a folder that goes away; target.path, data.path, run.dir, trainer.steps,
checkpoint, evaluate and profile are the bench's own, whatever the configuration says. The last log interval is not
counted: in it the target has nothing left to make, and queues run dry. What each side does alone is measured in this
job too; where one rank does both by turns, these are parts of one time, and what is lost shows beside the benches step
and target.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflash_model import UserError
from dflash_train.cli import parse
from dflash_train.config import RunConfig, key
from dflash_train.job import Job, check_job
from dflash_train.metrics import read_jsonl
from dflash_train.run import leave, run_job
from dflash_train.situation import Situation
from dflash_train.stop import Stop


@dataclass
class PipelineBench(RunConfig):
    """A training job; its target is the one of target.config, with random weights, and its documents are random."""

    warmup: int = key(2, "log intervals not counted, of log.interval steps each")
    repeats: int = key(5, "log intervals counted, each of at least four times channel.depth packs a drafter rank")


def bench_pipeline(argv: list[str]) -> dict[str, Any] | None:
    """Run, and measure from what the job logged; None on all ranks but the first, and if it was stopped."""
    rank, began = int(os.environ.get("RANK", "0")), time.time()
    config = parse(PipelineBench, argv, __doc__ or "")
    job_pid = os.getppid() if "RANK" in os.environ else os.getpid()  # torchrun is every rank's parent
    folder = Path(tempfile.gettempdir()) / f"dflash-bench-{job_pid}"
    job = bench_job(config, folder)
    stop, situation, lines = Stop(saves=False), Situation.of(job.split, rank), []
    stop.listen(situation)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a killed bench whose number the system gave out again
    try:
        run_job(job, stop, situation)
        own = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        memory = [own] * dist.get_world_size()
        if stop.agreed_step is None:
            dist.all_gather_object(memory, own)
        leave(stop, situation, config.channel.start_timeout_seconds)
        if rank == 0:
            lines = read_jsonl(folder / "run" / "metrics.jsonl")
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank or stop.agreed_step is not None:
        return None
    return {
        "bench": "pipeline", "split": job.split.describe(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **figures(job, lines[-config.repeats - 1 : -1]), "peak_gib": memory, "first_step_s": lines[0]["time"] - began,
    }  # fmt: skip


def bench_job(config: PipelineBench, folder: Path) -> Job:
    """The training job; on two ranks or more each counted interval has many more packs than the channel holds.

    Raises:
        UserError: a setting is missing or out of range.
    """
    if config.target.config is None:
        raise UserError("target.config is missing; it describes the target (config=tools/configs/qwen3.6-27b.yaml)")
    if config.dry_run:
        raise UserError("dry_run is true; a bench runs: tools/train.py takes dry_run")
    if config.log.interval < 1:
        raise UserError(f"log.interval is {config.log.interval}; it must be at least 1")
    if config.warmup < 0 or config.repeats < 1:
        raise UserError(f"warmup is {config.warmup} and repeats {config.repeats}; they take 0 or more, and 1 or more")
    config.run.dir, config.data.path, config.target.path = str(folder / "run"), str(folder / "data"), None
    config.data.synthetic_documents = config.data.synthetic_documents or 512
    config.evaluate.packs = config.checkpoint.interval = config.checkpoint.milestone_interval = 0
    config.profile.steps = []
    config.trainer.steps = (config.warmup + config.repeats + 1) * config.log.interval
    job = check_job(config, int(os.environ.get("WORLD_SIZE", "1")))
    packs, least = config.log.interval * job.micro_steps, 4 * config.channel.depth
    if not job.split.colocated and packs < least:
        raise UserError(
            f"log.interval is {config.log.interval}, {packs} packs of each drafter rank; it must be at least"
            f" {-(-least // job.micro_steps)}: over fewer packs, a queue that fills or drains hides the slower side"
        )
    return job


def figures(job: Job, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the counted log lines say; a pack counts as ``data.seq_len`` tokens, ``fill`` of which are documents."""
    tokens, together = job.config.data.seq_len, [row["packs_s"] for row in rows]
    target, drafter = (statistics.median(row[f"{side}_packs_s"] for row in rows) for side in ("target", "drafter"))
    median, slower = statistics.median(together), None if job.split.colocated else min(target, drafter)
    if slower and median > 1.02 * slower:
        begun, ended = (sum(rows[at]["q_hs"]) for at in (0, -1))
        print(
            f"faster than the slower side: packs that were made before ran out (q_hs {begun:g} to {ended:g}), or a side"
            " that is held up looks slower than it is; count more, with warmup and repeats",
            file=sys.stderr,
        )
    return {
        "ktok_s": median * tokens / 1e3, "min_ktok_s": min(together) * tokens / 1e3,
        "max_ktok_s": max(together) * tokens / 1e3, "target_ktok_s": target * tokens / 1e3,
        "drafter_ktok_s": drafter * tokens / 1e3, "share_of_slower_side": slower and median / slower,
        "fill": statistics.median(row["tokens_s"] / row["packs_s"] for row in rows) / tokens,
        "channel_gb_s": slower and median * job.layout().num_bytes / 1e9,
        "wait_share": statistics.median(row["wait_share"] for row in rows), "bound": rows[-1]["bound"],
        "seconds": rows[-1]["seconds"], "gpu_busy": rows[-1]["gpu_busy"],
    }  # fmt: skip

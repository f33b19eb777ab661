"""What a run writes: status line, log file, metrics.jsonl, evaluations.jsonl, TensorBoard.

Only the first drafter rank owns a ``RunLog``. On resume everything after the resumed step is cut away, so every curve
has one value a step.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard.writer import SummaryWriter

from dflash_data.packs import STATS
from dflash_data.schedule import WorkItem
from dflash_train.acceptance import Acceptance

logger = logging.getLogger("dflash")

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
STARTS, SUPERSEDED = "starts.jsonl", "superseded.jsonl"
LAYOUT = {
    "Train": {name: ["Multiline", [f"Train/{name}"]] for name in ("loss", "acc", "streak", "lr", "grad_norm")},
    "Acceptance": {"held-out": ["Margin", ["Acceptance/pooled", "Acceptance/low", "Acceptance/high"]]},
    "Pipeline": {
        "tokens/s": ["Multiline", ["Pipeline/target_tokens_s", "Pipeline/drafter_tokens_s", "Pipeline/tokens_s"]],
        "queues": ["Multiline", [r"Pipeline/q_.*"]],
    },
}


def start_logging(path: Path) -> None:
    """Send the run's log to the console and to ``log.txt``."""
    logger.setLevel(logging.INFO)
    logger.handlers.clear()
    for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(path)):
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def short_time(seconds: float) -> str:
    """``42s``, ``22m``, ``3h10m``, ``1d3h``."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m" if minutes else f"{int(seconds)}s"


@dataclass
class Interval:
    """Sums since the last log line, on one drafter rank.

    Attributes:
        targets: per target rank: packs received and the sums of their ``STATS``.
        wait_s: time this rank waited for training packs, as far as it has been taken from the receiver's clock.
        train_s: time this rank spent in training steps, waiting included.
        save_s: of it, time to copy the state for a checkpoint and to wait for the one before.
        numbers: the packs this rank trained on since the last log line, whichever process did.
        packs: how many this process trained on.
    """

    targets: NDArray[np.float64]
    wait_s: float = 0.0
    train_s: float = 0.0
    save_s: float = 0.0
    numbers: list[int] = field(default_factory=list)
    packs: int = 0

    @classmethod
    def empty(cls, num_targets: int) -> "Interval":
        """Nothing yet."""
        return cls(np.zeros((num_targets, 1 + len(STATS))))

    def add_pack(self, item: WorkItem, stats: dict[str, float]) -> None:
        """Count one received pack."""
        self.packs += 1
        self.numbers.append(item.number)
        self.targets[item.index % len(self.targets)] += [1.0, *(stats[name] for name in STATS)]


@dataclass(frozen=True)
class Pipeline:
    """The whole job over one interval, from the sums of all drafter ranks.

    Rates are packs per second: ``packs_s`` what went through, ``target_packs_s`` and ``drafter_packs_s`` what each side
    could do alone (its waiting left out).
    """

    packs_s: float
    tokens_s: float
    target_packs_s: float
    drafter_packs_s: float
    wait_share: float
    data_share: float
    q_pre: list[float]
    q_hs: list[float]
    colocated: bool

    @classmethod
    def measure(cls, targets: NDArray[np.float64], drafters: NDArray[np.float64], *, colocated: bool) -> "Pipeline":
        """Work out rates.

        Args:
            targets: ``[T, 1 + len(STATS)]`` sums.
            drafters: ``[D, 4]``: wait_s, train_s, packs, packs waiting (q_hs) of each drafter rank.
            colocated: whether the waiting is the rank's own target at work.
        """
        counts = np.maximum(targets[:, 0], 1.0)
        means = dict(zip(STATS, (targets[:, 1:] / counts[:, None]).T, strict=True))
        active = targets[:, 0] > 0
        wait_s, train_s, packs, depth = drafters.T
        busy_s = (means["forward_s"] + means["data_wait_s"])[active]
        if colocated:  # the rank's own target is what it waits for
            busy_s = wait_s / np.maximum(packs, 1.0)
        seconds, total = max(train_s.mean(), 1e-9), packs.sum()
        compute_s = np.maximum(train_s - wait_s, 1e-9)
        data = float(means["data_wait_s"][active].mean() / max(busy_s.mean(), 1e-9)) if active.any() else 0.0
        return cls(
            packs_s=total / seconds,
            tokens_s=float(targets[:, 1 + STATS.index("document_tokens")].sum()) / seconds,
            target_packs_s=len(targets) / max(busy_s.mean(), 1e-9) if active.any() else 0.0,
            drafter_packs_s=total / compute_s.mean(),
            wait_share=float(wait_s.mean() / seconds),
            data_share=data,
            q_pre=means["q_pre"].tolist(),
            q_hs=depth.tolist(),
            colocated=colocated,
        )

    def rates(self) -> dict[str, float]:
        """What is logged: packs and tokens per second of the job, and what each side could do alone."""
        tokens = self.tokens_s / max(self.packs_s, 1e-9)  # document tokens in a pack
        return {
            "packs_s": self.packs_s,
            "tokens_s": self.tokens_s,
            "target_packs_s": self.target_packs_s,
            "target_tokens_s": self.target_packs_s * tokens,
            "drafter_packs_s": self.drafter_packs_s,
            "drafter_tokens_s": self.drafter_packs_s * tokens,
            "wait_share": self.wait_share,
        }

    def verdict(self) -> str:
        """Which side holds the other up: drafter ranks that wait are starved by the targets, never the reverse.

        Colocated ranks do both in turn; there it names the side that takes more of their time.
        """
        if self.wait_share < 0.1 or (self.colocated and self.drafter_packs_s < self.target_packs_s):
            return "drafter-bound"
        return "data-bound" if self.data_share > 0.5 else "target-bound"


class RunLog:
    """Writers of one run.

    Args:
        folder: run folder.
        start_step: finished steps of the checkpoint that is resumed, 0 for a fresh run.
        num_steps: steps of the run.
        epoch_steps: steps in one epoch.
        flops_per_pack: counted operations of one pack.
        peak: FLOP/s of all drafter devices together, None if unknown.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start_step: int,
        num_steps: int,
        epoch_steps: float,
        flops_per_pack: float,
        peak: float | None,
    ) -> None:
        self.folder, self.start_step, self.num_steps, self.epoch_steps = folder, start_step, num_steps, epoch_steps
        self.flops_per_pack, self.peak = flops_per_pack, peak
        for name in (METRICS, EVALUATIONS):
            _cut(folder / name, start_step, folder / SUPERSEDED)
        self.board = SummaryWriter(
            str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else 0, flush_secs=10
        )
        self.board.add_custom_scalars(LAYOUT)
        self.began = time.monotonic()
        self.tau = self._last_tau()
        self.eta_from: tuple[int, float] | None = None

    def _last_tau(self) -> float | None:
        rows = read_jsonl(self.folder / EVALUATIONS)
        return rows[-1]["pooled"] if rows else None

    def step(
        self, step: int, values: dict[str, float], pipeline: Pipeline, *, memory_gib: float, packs: list[list[int]]
    ) -> None:
        """Write one logged step; ``packs`` are the ranges of numbers trained on since the line before."""
        mfu = pipeline.packs_s * self.flops_per_pack / self.peak if self.peak else None
        record: dict[str, Any] = {"step": step, **values, "tau": self.tau, **pipeline.rates()}
        record |= {
            "q_pre": pipeline.q_pre,
            "q_hs": pipeline.q_hs,
            "bound": pipeline.verdict(),
            "mfu": mfu,
            "packs": packs,
        }
        _append(self.folder / METRICS, record)
        for name, value in values.items():
            self.board.add_scalar(f"Train/{name}", value, step)
        for name, value in pipeline.rates().items():
            self.board.add_scalar(f"Pipeline/{name}", value, step)
        for name in ("q_pre", "q_hs"):
            for rank, depth in enumerate(record[name]):
                self.board.add_scalar(f"Pipeline/{name}_{rank}", depth, step)
        self.board.add_scalar("System/memory_gib", memory_gib, step)
        if mfu is not None:
            self.board.add_scalar("System/mfu", mfu, step)
        logger.info(self._line(step, values, pipeline, mfu))

    def _line(self, step: int, values: dict[str, float], pipeline: Pipeline, mfu: float | None) -> str:
        now = time.monotonic()
        if self.eta_from is None:
            self.eta_from = (step, now)  # the first interval is warm-up
        done, since = step - self.eta_from[0], now - self.eta_from[1]
        eta = short_time(since / done * (self.num_steps - step)) if done else "?"
        tau = f" tau {self.tau:.2f}" if self.tau is not None else ""
        use = f" mfu {mfu:.0%}" if mfu is not None else ""
        queues = f"q_pre {_ints(pipeline.q_pre)} q_hs {_ints(pipeline.q_hs)}"
        return (
            f"[{short_time(now - self.began)}] step {step} loss {values['loss']:.3f} acc {values['acc']:.3f}"
            f" streak {values['streak']:.2f}{tau} lr {values['lr']:.1e} | target {pipeline.target_packs_s:.2f} drafter"
            f" {pipeline.drafter_packs_s:.2f} packs/s {pipeline.tokens_s / 1e3:.2f} ktok/s{use} | {queues} |"
            f" {pipeline.verdict()} | epoch {step / self.epoch_steps:.2f} eta {eta}"
        )

    def evaluation(self, step: int, result: Acceptance, name: str) -> None:
        """Write one evaluation."""
        low, high = result.interval()
        record = {"step": step, "name": name, "pooled": result.pooled, "mean": result.mean, "low": low, "high": high}
        record |= {
            "prompts": len(result.tokens),
            "tokens": int(result.tokens.sum()),
            "rounds": int(result.rounds.sum()),
        }
        _append(self.folder / EVALUATIONS, record)
        self.tau = result.pooled
        for tag in ("pooled", "mean", "low", "high"):
            self.board.add_scalar(f"Acceptance/{tag}", record[tag], step)
        logger.info(
            f"held-out {name} acceptance at step {step}: {result.pooled:.3f} [{low:.3f}, {high:.3f}] pooled,"
            f" {result.mean:.3f} per prompt ({len(result.tokens)} prompts)"
        )

    def close(self) -> None:
        """Flush, and print what the run achieved."""
        self.board.close()
        rows = read_jsonl(self.folder / EVALUATIONS)
        if rows:
            first, last = rows[0], rows[-1]
            logger.info(
                f"held-out acceptance {first['pooled']:.2f} -> {last['pooled']:.2f} [{last['low']:.2f},"
                f" {last['high']:.2f}] ({last['prompts']} prompts)"
            )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a file, none if it does not exist."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")]


def _append(path: Path, record: dict[str, Any]) -> None:
    """Add a line; a value that is not finite (of a skipped step) is null, as JSON has no word for it."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    with path.open("a") as file:
        file.write(json.dumps(finite) + "\n")


def _cut(path: Path, start_step: int, superseded: Path) -> None:
    """Drop what came after the step that is resumed; nothing is lost: it goes to another file."""
    rows = read_jsonl(path)
    kept = [row for row in rows if start_step and row["step"] <= start_step]
    for row in rows[len(kept) :]:
        _append(superseded, {"file": path.name, **row})
    work = path.with_name(path.name + ".partial")
    work.write_text("".join(json.dumps(row) + "\n" for row in kept))
    work.replace(path)


def as_ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Sorted numbers as ``[first, last]`` pairs; a number that occurs twice begins a pair of its own."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _ints(values: list[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)

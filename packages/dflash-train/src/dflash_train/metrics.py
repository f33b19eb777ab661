"""What a run writes: status line, log file, metrics.jsonl, evaluations.jsonl, TensorBoard.

Only the first drafter rank owns a ``RunLog``. On resume everything after the resumed step is cut away, so every curve
has one value a step.
"""

import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard.writer import SummaryWriter

from dflash_data.packs import STATS
from dflash_data.schedule import WorkItem
from dflash_train.acceptance import Acceptance, Rounds, by_position
from dflash_train.verdict import COMPILING, STARTING, Accounts, Verdict, judge, mean_share
from dflash_train.watch import SpeedWatch

logger = logging.getLogger("dflash")

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
STABLE = 5  # log intervals after which the rates say something
ETA_LINES = 200  # log intervals that the eta goes by: long enough for evaluations, and a stall is forgotten
STARTS, SUPERSEDED = "starts.jsonl", "superseded.jsonl"
LAYOUT = {
    "Train": {name: ["Multiline", [f"Train/{name}$"]] for name in ("loss", "acc", "streak", "lr", "grad_norm")},
    "Acceptance": {
        "held-out": ["Margin", ["Acceptance/pooled", "Acceptance/low", "Acceptance/high"]],
        "held-out, by slot": ["Multiline", [r"Acceptance/slot_.*"]],
        "training, by slot, given all before": ["Multiline", [r"Train/acc_given_prefix_.*"]],
    },
    "Pipeline": {
        "tokens/s": ["Multiline", ["Pipeline/target_tokens_s", "Pipeline/drafter_tokens_s", "Pipeline/tokens_s$"]],
        "queues": ["Multiline", [r"Pipeline/q_.*"]],
    },
    "System": {
        "GPUs busy": ["Multiline", [r"System/.*_gpu_busy", "System/mfu"]],
        "memory, GiB": ["Multiline", ["System/memory_gib"]],
    },
    "Time": {
        "drafter ranks": ["Multiline", [r"Time/drafter_.*"]],
        "target ranks, a pack": ["Multiline", [r"Time/target_.*"]],
        "one step of the first drafter rank": ["Multiline", [r"Time/step_.*"]],
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
    """``42s``, ``22m05s``, ``3h10m``, ``1d3h``."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{int(seconds) % 60:02d}s" if minutes else f"{int(seconds)}s"


@dataclass
class Interval:
    """Sums since the last log line, on one drafter rank.

    Attributes:
        targets: per target rank: packs received and the sums of their ``STATS``.
        wait_s: time this rank waited for training packs, as far as it has been taken from the receiver's clock.
        numbers: the packs this rank trained on since the last log line, whichever process did.
        packs: how many this process trained on.
        tokens: document tokens of ``numbers``.
    """

    targets: NDArray[np.float64]
    wait_s: float = 0.0
    numbers: list[int] = field(default_factory=list)
    packs: int = 0
    tokens: float = 0.0

    @classmethod
    def empty(cls, num_targets: int) -> "Interval":
        """Nothing yet."""
        return cls(np.zeros((num_targets, 1 + len(STATS))))

    def add_pack(self, item: WorkItem, stats: dict[str, float]) -> None:
        """Count one received pack."""
        self.packs += 1
        self.numbers.append(item.number)
        self.tokens += stats["document_tokens"]
        self.targets[item.index % len(self.targets)] += [1.0, *(stats[name] for name in STATS)]


class RunLog:
    """Writers of one run.

    Args:
        folder: run folder.
        start_step: finished steps of the checkpoint that is resumed, 0 for a fresh run.
        evaluated: whether the evaluation behind that step is behind it.
        num_steps: steps of the run.
        epoch_steps: steps in one epoch.
        flops_per_pack: counted operations of one pack.
        peak: FLOP/s of all drafter devices together, None if unknown.
        expected_tokens_s: speed below half of which is an alarm.
        description: settings, versions and command, for a page of their own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start_step: int,
        evaluated: bool,
        num_steps: int,
        epoch_steps: float,
        flops_per_pack: float,
        peak: float | None,
        expected_tokens_s: float | None,
        description: str,
    ) -> None:
        self.folder, self.start_step, self.num_steps, self.epoch_steps = folder, start_step, num_steps, epoch_steps
        self.flops_per_pack, self.peak = flops_per_pack, peak
        for name in (METRICS, EVALUATIONS):
            last = start_step if name == METRICS or evaluated else start_step - 1
            _cut(folder / name, last if start_step else -1, folder / SUPERSEDED)
        self.board = SummaryWriter(
            str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else 0, flush_secs=10
        )
        self.board.add_custom_scalars(LAYOUT)
        self.began = time.monotonic()
        self.tau, self.tau_step = self._last_tau()
        self.recent: deque[tuple[int, float]] = deque(maxlen=ETA_LINES)  # steps and when their lines were written
        self.speed, self.told, self.verdicts = SpeedWatch(expected_tokens_s), "", 0
        self.unwritable: set[str] = set()
        self.last_step = start_step
        self._text("run", description, start_step)

    def _last_tau(self) -> tuple[float | None, int]:
        rows = read_jsonl(self.folder / EVALUATIONS)
        return (rows[-1]["pooled"], rows[-1]["step"]) if rows else (None, 0)

    def step(
        self, step: int, values: dict[str, float], accounts: Accounts, *, parts: dict[str, float],
        memory_gib: float | None, packs: list[list[int]],
    ) -> None:  # fmt: skip
        """Write one logged step.

        Args:
            step: its number.
            values: of training.
            accounts: where time went since the line before.
            parts: seconds of this one step's parts, on the device.
            memory_gib: most that was allocated on a GPU.
            packs: ranges of numbers trained on since the line before.
        """
        self.last_step = step
        mfu = accounts.packs_s * self.flops_per_pack / self.peak if self.peak else None
        verdict, rates = judge(accounts), accounts.rates()
        if not self.recent and verdict.name != COMPILING:
            verdict = STARTING
        record: dict[str, Any] = {"step": step, "time": time.time(), **values, "tau": self.tau, **rates}
        record |= {"q_pre": accounts.q_pre(), "q_hs": accounts.drafter("q_hs").tolist(), "bound": verdict.name}
        record |= {"evidence": verdict.evidence, "mfu": mfu, "memory_gib": memory_gib, "packs": packs}
        record["seconds"] = accounts.seconds() | {f"step_{name}_s": seconds for name, seconds in parts.items()}
        record["document_tokens"] = float(accounts.drafter("tokens").sum())
        queues = {f"{name}_{rank}": depth for name in ("q_pre", "q_hs") for rank, depth in enumerate(record[name])}
        busy = {"drafter_gpu_busy": accounts.drafter("busy"), "target_gpu_busy": accounts.target("busy")}
        known = {name: mean_share(shares) for name, shares in busy.items()}
        system: dict[str, float | None] = {"memory_gib": memory_gib, "mfu": mfu, **known}
        use = (f" mfu {mfu:.0%}" if mfu is not None else "") + (f" mem {memory_gib:.1f} GiB" if memory_gib else "")
        record["gpu_busy"] = known
        with self._never_in_the_way(METRICS):
            append(self.folder / METRICS, record)
        groups = {"Train": values, "Pipeline": rates | queues, "Time": record["seconds"], "System": system}
        with self._never_in_the_way("tensorboard"):
            for group, scalars in groups.items():
                for name, value in scalars.items():
                    if value is not None:
                        self.board.add_scalar(f"{group}/{name}", value, step)
        logger.info(self._line(step, values, accounts, verdict, use))
        self._tell(step, verdict, accounts)

    @contextmanager
    def _never_in_the_way(self, what: str) -> Iterator[None]:
        """A full disk or a folder that went away is told once and does not stop training."""
        try:
            yield
        except OSError as error:
            if what not in self.unwritable:
                self.unwritable.add(what)
                logger.warning(f"{self.folder / what} cannot be written any more ({error}); training goes on")

    def _text(self, tag: str, text: str, step: int) -> None:
        with self._never_in_the_way("tensorboard"):
            self.board.add_text(tag, text, step)

    def alarm(self, alarm: str) -> None:
        """In the log, and on the board's page of texts."""
        self._text("alarm", alarm, self.last_step)
        logger.warning(f"ALARM: {alarm}")

    def _tell(self, step: int, verdict: Verdict, accounts: Accounts) -> None:
        """The evidence when the verdict is a new one, what other splits would do once, and the loss of speed."""
        account = f"{verdict} ({accounts.sentence()})"
        self.verdicts += 1
        if verdict.name != self.told:
            self.told = verdict.name
            self._text("verdict", str(verdict), step)
            logger.info(account)
        if self.verdicts == STABLE and len(splits := accounts.splits()) > 1:
            told = ", ".join(f"{targets}+{drafters} {rate:.2f}" for targets, drafters, rate in splits)
            logger.info(f"expected packs/s by split: {told}")
        alarm = self.speed.add(accounts.tokens_s, account)
        if alarm is not None:
            self.alarm(alarm)

    def _line(self, step: int, values: dict[str, float], accounts: Accounts, verdict: Verdict, use: str) -> str:
        now = time.monotonic()
        self.recent.append((step, now))  # from the end of the first interval on, which is warm-up
        done, since = step - self.recent[0][0], now - self.recent[0][1]
        eta = short_time(since / done * (self.num_steps - step)) if done else "?"
        tau = f" tau {self.tau:.2f}@{self.tau_step}" if self.tau is not None else ""
        noise = f" noise {values['context_noise']:.2g}" if "context_noise" in values else ""
        queues = f"q_pre {_ints(accounts.q_pre())} q_hs {_ints(accounts.drafter('q_hs').tolist())}"
        return (
            f"[{short_time(now - self.began)}] step {step} loss {values['loss']:.3f} acc {values['acc']:.3f}"
            f" streak {values['streak']:.2f}{tau} lr {values['lr']:.1e}{noise} | target {accounts.target_packs_s:.2f}"
            f" drafter {accounts.drafter_packs_s:.2f} packs/s {accounts.tokens_s / 1e3:.2f} ktok/s{use} | {queues} |"
            f" {verdict.name} | epoch {step / self.epoch_steps:.2f} eta {eta}"
        )

    def evaluation(self, step: int, texts: list[Rounds], block_size: int, name: str) -> None:
        """Write one evaluation."""
        result, positions = Acceptance.of(texts), by_position(texts, block_size)
        low, high = result.interval()
        record = {"step": step, "name": name, "pooled": result.pooled, "mean": result.mean, "low": low, "high": high}
        record |= {
            "prompts": len(result.tokens),
            "tokens": int(result.tokens.sum()),
            "rounds": int(result.rounds.sum()),
            "positions": positions,
        }
        with self._never_in_the_way(EVALUATIONS):
            append(self.folder / EVALUATIONS, record)
        self.tau, self.tau_step = result.pooled, step
        with self._never_in_the_way("tensorboard"):
            for tag in ("pooled", "mean", "low", "high"):
                self.board.add_scalar(f"Acceptance/{tag}", record[tag], step)
            for row in positions:
                if row["accepted"] is not None:
                    self.board.add_scalar(f"Acceptance/slot_{row['slot']}", row["accepted"], step)
            self.board.add_image(
                "Acceptance/by_slot", bars([row["accepted"] or 0.0 for row in positions]), step, dataformats="HWC"
            )
        logger.info(
            f"held-out {name} acceptance at step {step}: {result.pooled:.3f} [{low:.3f}, {high:.3f}] pooled,"
            f" {result.mean:.3f} per prompt ({len(result.tokens)} prompts)"
        )

    def flush(self) -> None:
        """Write what the board still holds."""
        with self._never_in_the_way("tensorboard"):
            self.board.flush()

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


def bars(shares: list[float]) -> NDArray[np.uint8]:
    """A picture ``[120, 24 n, 3]`` with a bar for each share, lines at a quarter, a half, three quarters."""
    picture = np.full((120, 24 * len(shares), 3), 255, dtype=np.uint8)
    picture[[30, 60, 90]] = 215
    for index, share in enumerate(shares):
        picture[120 - round(120 * share) :, 24 * index + 3 : 24 * index + 21] = (0, 114, 178)
    return picture


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a file, none if it does not exist."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n") if line.startswith("{") and line.endswith("}")]


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line; a value that is not finite (of a skipped step) is null, as JSON has no word for it.

    What a kill or a full disk cut off before it stays a line of its own, which is not read.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    with path.open("ab+") as file:
        file.seek(-1 if file.tell() else 0, os.SEEK_END)
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(finite).encode() + b"\n")


def _cut(path: Path, last_step: int, superseded: Path) -> None:
    """Drop what came after a step; nothing is lost: it goes to another file."""
    rows = read_jsonl(path)
    kept = [row for row in rows if row["step"] <= last_step]
    for row in rows[len(kept) :]:
        append(superseded, {"file": path.name, **row})
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

"""Proof from a run folder that every pack was trained on exactly once in the history that survives.

The history is ``metrics.jsonl``, whose lines name the packs that the drafter ranks really received, and what the newest
checkpoint holds of steps that are not logged yet. Lines of steps that a kill undid are in ``superseded.jsonl``.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model import UserError
from dflash_train.checkpoint import Position
from dflash_train.metrics import METRICS, STARTS, SUPERSEDED, as_ranges, read_jsonl
from dflash_train.retention import list_checkpoints, read_manifest


@dataclass(frozen=True)
class Audit:
    """What a run trained on.

    Attributes:
        packs: training packs that the history must hold, from 0.
        missing: ranges of numbers that it lacks.
        repeated: ranges of numbers that it has more than once, or that lie beyond.
        position: of the newest checkpoint.
        starts: lines of ``starts.jsonl``.
        superseded: log lines that resumes undid.
    """

    packs: int
    missing: list[list[int]]
    repeated: list[list[int]]
    position: Position
    starts: list[dict[str, Any]]
    superseded: int

    @property
    def exact(self) -> bool:
        """Whether every pack occurs exactly once."""
        return not self.missing and not self.repeated


def audit(run_dir: Path) -> Audit:
    """Read a run folder, of a run that is over or under way.

    Raises:
        UserError: it holds no run.
    """
    rows = read_jsonl(run_dir / METRICS)
    steps = list_checkpoints(run_dir / "checkpoints")
    if not rows and not steps:
        raise UserError(f"run.dir is {run_dir}; it holds neither {METRICS} nor a checkpoint")
    position = Position.of(read_manifest(run_dir / "checkpoints", steps[-1])) if steps else Position()
    counts = Counter(number for row in rows for first, last in row["packs"] for number in range(first, last + 1))
    logged = rows[-1]["step"] if rows else 0
    if position.step > logged:
        counts.update(number for part in position.unlogged for number in part["packs"])
    # A run under way, or killed, has logged steps behind its newest checkpoint: they must follow without a gap.
    packs = max(position.packs, max(counts, default=-1) + 1)
    missing = as_ranges(set(range(packs)) - set(counts))
    repeated = as_ranges(number for number, times in counts.items() if times > 1)
    return Audit(
        packs, missing, repeated, position, read_jsonl(run_dir / STARTS), len(read_jsonl(run_dir / SUPERSEDED))
    )


def report(run_dir: Path, found: Audit) -> str:
    """The audit as lines for a person."""
    lines = [f"{run_dir}: newest checkpoint at step {found.position.step}, {found.packs} packs in its history"]
    lines += [f"  started at step {start['step']} as {start['split']}, {start['time']}" for start in found.starts]
    lines += [f"    changed: {change}" for start in found.starts for change in start["changes"]]
    if found.superseded:
        lines.append(f"  {found.superseded} log lines were superseded by resumes")
    if found.position.skipped:
        lines.append(f"  {found.position.skipped} steps were skipped, their gradients were not finite (see log.txt)")
    lines += [f"  never trained on: packs {first} to {last}" for first, last in found.missing]
    lines += [f"  more than once: packs {first} to {last}" for first, last in found.repeated]
    verdict = f"each of the packs 0 to {found.packs - 1} exactly once" if found.packs else "no pack yet"
    lines.append(verdict if found.exact else "NOT each pack exactly once")
    return "\n".join(lines)

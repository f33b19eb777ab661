"""Which checkpoints a run folder holds, and which of them stay."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model import UserError

MANIFEST = "manifest.json"
SUPERSEDED, REMOVED = ".superseded", ".removed"  # behind a checkpoint's name, on its way out
BEST = "best"  # a link to the best checkpoint


@dataclass(frozen=True)
class Retention:
    """What is kept: the newest, milestones for good, and the best by held-out acceptance.

    Attributes:
        newest: how many of the newest.
        milestone_interval: steps between milestones; 0 for none.
    """

    newest: int
    milestone_interval: int

    def choose(self, acceptance: dict[int, float | None]) -> tuple[set[int], int | None]:
        """Steps to keep, and the best of all (the later of two equals; None if none was evaluated).

        Args:
            acceptance: held-out acceptance length of each complete checkpoint by step, where there was an evaluation.
        """
        steps = sorted(acceptance)
        kept = set(steps[-self.newest :])
        if self.milestone_interval:
            kept |= {step for step in steps if step % self.milestone_interval == 0}
        known = [(value, step) for step, value in acceptance.items() if value is not None]
        best = max(known)[1] if known else None
        return kept | ({best} if best is not None else set()), best


def list_checkpoints(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdigit() and str(int(name)) == name)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint's manifest, with a checksum of itself."""
    (folder / MANIFEST).write_text(json.dumps(content | {"digest": _digest(content)}, indent=2) + "\n")


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        UserError: it is missing or is not what was written.
    """
    path = folder / f"step-{step}" / MANIFEST
    problem = "is not what was written"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        problem = "is missing"
    except (json.JSONDecodeError, UnicodeDecodeError):
        problem = "is damaged"
    else:
        if content.pop("digest", None) == _digest(content):
            return content
    raise UserError(f"{path} {problem}; remove {path.parent} and the same command continues from the one before")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

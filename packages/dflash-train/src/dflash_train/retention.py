"""Which checkpoints a run folder holds, and which of them stay."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
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
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if (path / MANIFEST).is_file())
    return sorted(int(name) for name in names if name.isdigit())


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    manifest: dict[str, Any] = json.loads((folder / f"step-{step}" / MANIFEST).read_text())
    return manifest

"""Finding where a run goes on: the newest complete checkpoint, checked against its checksums and the settings."""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dflash_model import UserError
from dflash_train.checkpoint import Position, digest
from dflash_train.retention import list_checkpoints, read_manifest


def find_position(folder: Path, identity: dict[str, Any], allow: list[str]) -> tuple[Position, list[str]]:
    """Where the run stands, and sentences about the settings that were allowed to differ.

    All ranks of the job call it; each checks its share of the files, and what one finds is raised by all.

    Args:
        folder: ``<run.dir>/checkpoints``.
        identity: this run's settings by dotted name.
        allow: names that may differ from the checkpoint's (``resume.allow``).

    Raises:
        UserError: a setting differs, or a file is not what was written.
    """
    unknown = sorted(set(allow) - set(identity))
    if unknown:
        raise UserError(f"resume.allow names {unknown[0]}; it takes {', '.join(sorted(identity))}")
    steps = list_checkpoints(folder)
    if not steps:
        return Position(), []
    manifest = read_manifest(folder, steps[-1])
    changes = []
    for name, value in identity.items():
        if manifest.get(name) == value:
            continue
        if name not in allow:
            raise UserError(
                f"run.dir holds a run with {name} = {manifest.get(name)}, this one has {value}; resuming would change"
                f" the run: restore the setting, allow it with resume.allow=[{name}], or choose another run.dir"
            )
        changes.append(f"{name} was {manifest.get(name)} up to step {steps[-1]}, now {value}")
    _check_files(folder, steps, manifest["files"])
    return Position.of(manifest), changes


def _check_files(folder: Path, steps: list[int], files: dict[str, str]) -> None:
    """Compare checksums, the files shared out over the ranks."""
    newest, rank, ranks = folder / f"step-{steps[-1]}", dist.get_rank(), dist.get_world_size()
    problem = None
    for name in sorted(files)[rank::ranks]:
        path = newest / name
        if not path.is_file():
            problem = f"{path} is missing"
        elif digest(path) != files[name]:
            problem = f"{path} is not what was written: its checksum differs"
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, problem)
    for sentence in found:
        if sentence is not None:
            before = f"step {steps[-2]}" if len(steps) > 1 else "the beginning"
            raise UserError(f"{sentence}; remove {newest} and the same command continues from {before}")


def clear_leftovers(folder: Path) -> None:
    """Remove what a kill in the middle of a save left; complete checkpoints are untouched."""
    for pattern in ("step-*.partial", "step-*.superseded"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)

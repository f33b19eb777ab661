"""Finding where a run goes on: the newest complete checkpoint, checked against its checksums and the settings."""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dflash_model import UserError
from dflash_train.checkpoint import Position, digest
from dflash_train.cli import flat_keys
from dflash_train.config import RunConfig
from dflash_train.retention import REMOVED, SUPERSEDED, list_checkpoints, read_manifest

SHAPE = "drafter"


def find_position(folder: Path, identity: dict[str, Any], allow: list[str]) -> tuple[Position, list[str]]:
    """Where the run stands, and sentences about the settings that were allowed to differ.

    Args:
        folder: ``<run.dir>/checkpoints``.
        identity: this run's settings by dotted name.
        allow: names that may differ from the checkpoint's (``resume.allow``).

    Raises:
        UserError: a setting differs, or the manifest is not what was written.
    """
    allowed = sorted(set(identity) - {SHAPE})
    for name in allow:
        if name == SHAPE:
            raise UserError(f"resume.allow names {SHAPE}; another shape takes another run, with drafter.init_from")
        if name not in allowed:
            raise UserError(f"resume.allow names {name}; it takes {', '.join(allowed)}")
    steps = list_checkpoints(folder)
    if not steps:
        return Position(), []
    manifest = read_manifest(folder, steps[-1])
    defaults = {name: default for name, default, _ in flat_keys(RunConfig)}
    changes, refused = [], {}
    for name, value in identity.items():
        # A key that is younger than the checkpoint: until there was one, its default was what happened.
        before = manifest[name] if name in manifest else defaults.get(name)
        if before == value:
            continue
        if name not in allow:
            then, now = _differing(before or {}, value) if name == SHAPE else (before, value)
            refused[name] = f"{name} = {then}, this one has {now}"
            continue
        changes.append(f"{name} was {before} up to step {steps[-1]}, now {value}")
    if refused:
        way_out = f"allow it with resume.allow=[{','.join(refused)}], " if SHAPE not in refused else ""
        raise UserError(
            f"run.dir holds a run with {'; with '.join(refused.values())}; resuming would change the run:"
            f" restore what differs, {way_out}or choose another run.dir"
        )
    return Position.of(manifest), changes


def check_files(folder: Path, step: int) -> None:
    """Compare a checkpoint's files with its checksums, shared out over all ranks of the job, which all call it.

    Raises:
        UserError: on all ranks, what one of them found.
    """
    if not step:
        return
    checkpoint, rank, ranks = folder / f"step-{step}", dist.get_rank(), dist.get_world_size()
    files, problem = read_manifest(folder, step)["files"], None
    for name in sorted(files)[rank::ranks]:
        path = checkpoint / name
        if not path.is_file():
            problem = f"{path} is missing"
        elif digest(path) != files[name]:
            problem = f"{path} is not what was written: its checksum differs"
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, problem)
    before = [earlier for earlier in list_checkpoints(folder) if earlier < step]
    for sentence in found:
        if sentence is not None:
            start = f"step {before[-1]}" if before else "the beginning"
            raise UserError(f"{sentence}; remove {checkpoint} and the same command continues from {start}")


def clear_leftovers(folder: Path) -> None:
    """Tidy up behind a kill in the middle of a save; a checkpoint that was about to be replaced is put back."""
    for path in folder.glob(f"step-*{SUPERSEDED}"):
        final = path.with_name(path.name.removesuffix(SUPERSEDED))
        if not final.exists():
            path.rename(final)
    for pattern in ("step-*.partial", f"step-*{SUPERSEDED}", f"step-*{REMOVED}"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of two drafters' config.json, the entries that are not the same."""
    first, second = {}, {}
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            a, b = _differing(a, b)
        if a != b:
            first[name], second[name] = a, b
    return first, second

"""Checkpoints of the drafter ranks: weights, moments, schedule and the step, by torch's distributed checkpoint.

A checkpoint is written to ``step-N.partial`` and renamed when every rank has finished, so a folder named ``step-N`` is
complete. Beside the sharded state stands ``dflash/``, the drafter in the layout that servers load.
"""

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dflash_model import Drafter, UserError, save_drafter
from dflash_train.parallelize import full_state
from dflash_train.titan import LRSchedulersContainer, OptimizersContainer

MANIFEST = "manifest.json"


@dataclass
class Checkpointer:
    """Saves and restores one run.

    Attributes:
        folder: ``<run.dir>/checkpoints``.
        group: gloo group of the drafter ranks.
        keep: newest checkpoints kept.
        identity: what a resumed run must agree on.
        facts: what else the model card of an exported drafter tells; not compared.
    """

    folder: Path
    group: dist.ProcessGroup
    keep: int
    identity: dict[str, Any]
    facts: dict[str, Any]

    def save(
        self, step: int, drafter: Drafter, optimizers: OptimizersContainer, schedule: LRSchedulersContainer
    ) -> Path:
        """Write ``step-N``; all drafter ranks call it. Returns the published folder."""
        final, work = self.folder / f"step-{step}", self.folder / f"step-{step}.partial"
        first = dist.get_rank(self.group) == 0
        if first:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
        dist.barrier(self.group)
        dcp.save(_state(drafter, optimizers, schedule), checkpoint_id=work / "state", process_group=self.group)
        state = full_state(drafter)
        if first:
            save_drafter(state, drafter.config, work / "dflash")
            (work / MANIFEST).write_text(
                json.dumps({"step": step, **self.identity, "facts": self.facts}, indent=2) + "\n"
            )
            shutil.rmtree(final, ignore_errors=True)
            work.rename(final)
            for old in list_checkpoints(self.folder)[: -self.keep]:
                shutil.rmtree(self.folder / f"step-{old}")
        dist.barrier(self.group)
        return final

    def load(
        self, step: int, drafter: Drafter, optimizers: OptimizersContainer, schedule: LRSchedulersContainer
    ) -> None:
        """Restore ``step-N`` in place, whatever number of ranks wrote it."""
        state = _state(drafter, optimizers, schedule)
        dcp.load(state, checkpoint_id=self.folder / f"step-{step}" / "state", process_group=self.group)
        drafter.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizer"])
        with warnings.catch_warnings():  # torchtitan recomputes the rate with a method that torch warns about
            warnings.filterwarnings("ignore", message="To get the last learning rate")
            schedule.load_state_dict(state["schedule"])


def _state(drafter: Drafter, optimizers: OptimizersContainer, schedule: LRSchedulersContainer) -> dict[str, Any]:
    return {"model": drafter.state_dict(), "optimizer": optimizers.state_dict(), "schedule": schedule.state_dict()}


def list_checkpoints(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if (path / MANIFEST).is_file())
    return sorted(int(name) for name in names if name.isdigit())


def find_resume_step(folder: Path, identity: dict[str, Any]) -> int:
    """Step of the newest checkpoint, 0 if there is none.

    Raises:
        UserError: it belongs to a run that would go through other packs.
    """
    steps = list_checkpoints(folder)
    if not steps:
        return 0
    manifest = json.loads((folder / f"step-{steps[-1]}" / MANIFEST).read_text())
    for name, value in identity.items():
        if manifest.get(name) != value:
            raise UserError(
                f"run.dir holds a run with {name} = {manifest.get(name)}, this one has {value}; resuming would"
                " change the run: restore the setting or choose another run.dir"
            )
    return int(manifest["step"])

"""Checkpoints of the drafter ranks: fp32 weights, moments, schedule and the run's position, by torch's DCP.

The state is copied to host memory on the main thread; a thread of its own, on a gloo group of its own, writes it while
training goes on. A checkpoint is written to ``step-N.partial``, synced to disk, and renamed when every rank has
finished: a folder named ``step-N`` is complete. Older ones are removed only after that. Beside the sharded state stands
``dflash/``, the drafter in the layout that servers load, and a manifest with a checksum of every file: DCP itself loads
a flipped byte without a word.
"""

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from dflash_model import Drafter, UserError, save_drafter
from dflash_train.retention import (
    BEST,
    MANIFEST,
    REMOVED,
    SUPERSEDED,
    Retention,
    list_checkpoints,
    read_manifest,
    write_manifest,
)
from dflash_train.titan import LRSchedulersContainer, OptimizersContainer

Value = TypeVar("Value")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the one before it is intact."""


@dataclass(frozen=True)
class Position:
    """Where a run stands, beside its tensors.

    Attributes:
        step: finished optimizer steps.
        packs: training packs consumed; the next step begins with this number.
        evaluated: whether the evaluation that follows the step has been done, if one does.
        acceptance: its pooled acceptance length.
        skipped: steps skipped so far because their gradients were not finite.
        skipped_in_a_row: of these, the last ones without another between.
        unlogged: per drafter rank, what its next log line will hold of the steps before: ``sums`` of the metrics and
            numbers of the ``packs``.
    """

    step: int = 0
    packs: int = 0
    evaluated: bool = False
    acceptance: float | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    unlogged: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> "Position":
        """Read from a checkpoint's manifest."""
        return cls(**manifest["position"])


class Checkpointer:
    """Saves and restores one run; all drafter ranks call each method together.

    Args:
        folder: ``<run.dir>/checkpoints``.
        group: gloo group of the drafter ranks that nothing else uses.
        retention: which checkpoints stay.
        identity: what a resumed run must agree on.
        facts: what else the model card of an exported drafter tells; not compared.
    """

    def __init__(
        self, folder: Path, group: dist.ProcessGroup, retention: Retention, identity: dict[str, Any],
        facts: dict[str, Any],
    ) -> None:  # fmt: skip
        self.folder, self.group, self.retention = folder, group, retention
        self.identity, self.facts = identity, facts
        self.first = dist.get_rank(group) == 0
        on_gpu = torch.cuda.is_available()
        # Pinned memory is taken once and used again: a copy from the device at full speed, 12 bytes a parameter.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=on_gpu)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str] | None = None

    def save(
        self, position: Position, drafter: Drafter, optimizers: OptimizersContainer, schedule: LRSchedulersContainer
    ) -> None:
        """Copy the state and begin to write ``step-N``; waits for the one before to be finished.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.wait()
        staged = self._stager.stage(_state(drafter, optimizers, schedule))
        shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
        self._writing = self._thread.submit(self._write, position, staged, drafter, shapes)

    def finished(self) -> str | None:
        """What to log of a save that ended since the last call.

        Raises:
            CheckpointError: it failed, on every rank.
        """
        return self.wait() if self._writing is not None and self._writing.done() else None

    def wait(self) -> str | None:
        """Wait for the save under way; returns what to log of it.

        Raises:
            CheckpointError: it failed, on every rank.
        """
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def load(
        self, step: int, drafter: Drafter, optimizers: OptimizersContainer, schedule: LRSchedulersContainer
    ) -> None:
        """Restore ``step-N`` in place, whatever number of ranks wrote it."""
        state = _state(drafter, optimizers, schedule)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        settings = [{name: group[name] for name in ("weight_decay", "betas")} for group in groups]
        try:
            dcp.load(state, checkpoint_id=self.folder / f"step-{step}" / "state", process_group=self.group)
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint step-{step} cannot be loaded: {_reason(error)}") from error
        drafter.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizer"])
        for optimizer in optimizers:  # the loaded state has those of the run that wrote it; this one's may be allowed
            for group, own in zip(optimizer.param_groups, settings, strict=False):
                group.update(own)
        with warnings.catch_warnings():  # torchtitan recomputes the rate with a method that torch warns about
            warnings.filterwarnings("ignore", message="To get the last learning rate")
            schedule.load_state_dict(state["schedule"])

    def _write(self, position: Position, state: dict[str, Any], drafter: Drafter, shapes: dict[str, Any]) -> str:
        """Write, check and publish a staged state (on the thread)."""
        began = time.perf_counter()
        final, work = self.folder / f"step-{position.step}", self.folder / f"step-{position.step}.partial"

        def clear() -> None:
            if self.first:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)

        def write() -> None:
            dcp.save(state, checkpoint_id=work / "state", process_group=self.group)

        def own_digests() -> dict[str, str]:
            rank = dist.get_rank(self.group)
            own = [*(work / "state").glob(f"__{rank}_*"), *([work / "state" / ".metadata"] if self.first else [])]
            return {str(path.relative_to(work)): digest(path) for path in own}

        def publish() -> None:
            if not self.first:
                return
            save_drafter(_model_of(work / "state", shapes), drafter.config, work / "dflash")
            files = {name: value for part in parts for name, value in part.items()}
            files |= {str(path.relative_to(work)): digest(path) for path in sorted((work / "dflash").iterdir())}
            manifest = {"step": position.step, "position": asdict(position), **self.identity, "facts": self.facts}
            write_manifest(work, manifest | {"files": files})
            for path in (*(work / "dflash").iterdir(), work / MANIFEST, work / "state", work / "dflash", work):
                sync(path)
            if final.exists():  # damaged and left there, or written before its evaluation was done
                aside = final.with_name(final.name + SUPERSEDED)
                shutil.rmtree(aside, ignore_errors=True)
                final.rename(aside)
            work.rename(final)
            sync(self.folder)

        for task in (clear, write):
            self._together(position.step, task)
        parts = self._together(position.step, own_digests)
        self._together(position.step, publish)
        self._together(position.step, self._tidy)
        return f"saved {final} in {time.perf_counter() - began:.1f} s"

    def _tidy(self) -> None:
        """Link the best checkpoint and remove those that are not to stay."""
        if not self.first:
            return
        acceptance = {step: self._acceptance(step) for step in list_checkpoints(self.folder)}
        kept, best = self.retention.choose(acceptance)
        if best is not None:
            link = self.folder / f"{BEST}.partial"
            link.unlink(missing_ok=True)
            link.symlink_to(f"step-{best}")
            if (self.folder / BEST).is_dir() and not (self.folder / BEST).is_symlink():
                shutil.rmtree(self.folder / BEST)  # the run was copied by a tool that follows links
            link.replace(self.folder / BEST)
        for step in set(acceptance) - kept:  # under another name first: half removed, it must not look like one
            removed = self.folder / f"step-{step}{REMOVED}"
            (self.folder / f"step-{step}").rename(removed)
            shutil.rmtree(removed)
        for old in self.folder.glob(f"step-*{SUPERSEDED}"):
            shutil.rmtree(old)

    def _acceptance(self, step: int) -> float | None:
        """Of a checkpoint that may have been damaged since."""
        try:
            return Position.of(read_manifest(self.folder, step)).acceptance
        except UserError:
            return None

    def _together(self, step: int, task: Callable[[], Value]) -> list[Value]:
        """Do something on all drafter ranks; an error of one is an error of all.

        Returns:
            What each rank returned.
        """
        value, error = None, None
        try:
            value = task()
        except (
            Exception,
            CheckpointException,
        ) as failure:  # DCP's derives from BaseException; told to all ranks, which raise it
            error = _reason(failure)
        outcomes: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(outcomes, (value, error), group=self.group)
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                steps = [kept for kept in list_checkpoints(self.folder) if task == self._tidy or kept != step]
                last = f"the last complete one is step-{steps[-1]}" if steps else "there is no earlier one"
                raise CheckpointError(
                    f"checkpoint step-{step} could not be written to {self.folder} by drafter rank {rank}: {problem};"
                    f" {last}"
                )
        return [value for value, _ in outcomes]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _state(drafter: Drafter, optimizers: OptimizersContainer, schedule: LRSchedulersContainer) -> dict[str, Any]:
    return {"model": drafter.state_dict(), "optimizer": optimizers.state_dict(), "schedule": schedule.state_dict()}


def _model_of(folder: Path, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Whole parameters in bf16 from a written state, read one at a time."""
    whole = {}
    for name, shape in shapes.items():
        one = {"model": {name: torch.empty(shape)}}
        # What dcp.load(no_dist=True) does, without its warning at every call.
        _load_state_dict(one, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        whole[name] = one["model"][name].to(torch.bfloat16)
    return whole


def _reason(error: BaseException) -> str:
    """The system's own words of an error that DCP has wrapped, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[-1]}"[:300] if words else type(error).__name__

"""Which rank does what, and the process groups of the job.

Ranks 0 … T-1 hold the target, the next D hold the drafter; colocated, every rank holds both. Each process group has
one owning thread: the mesh groups and ``control`` the main thread, ``channel`` the channel thread.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from dflash_model.errors import UserError
from dflash_train.config import MeshSection

KNOWN_SPLITS = {2: (1, 1), 3: (2, 1), 8: (5, 3)}


@dataclass(frozen=True)
class Split:
    """How the ranks of a job are divided: T target ranks, D drafter ranks."""

    num_targets: int
    num_drafters: int
    colocated: bool

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.num_targets if self.colocated else self.num_targets + self.num_drafters

    def target_rank(self, rank: int) -> int | None:
        """Index among the target ranks, or None."""
        return rank if rank < self.num_targets else None

    def drafter_rank(self, rank: int) -> int | None:
        """Index among the drafter ranks, or None."""
        if self.colocated:
            return rank
        return rank - self.num_targets if rank >= self.num_targets else None

    def drafter_global(self, drafter_rank: int) -> int:
        """Rank in the job of a drafter rank."""
        return drafter_rank if self.colocated else self.num_targets + drafter_rank

    def describe(self) -> str:
        """For the log: ``5 target + 3 drafter ranks``."""
        if self.colocated:
            return f"{self.num_targets} rank(s), target and drafter colocated"
        return f"{self.num_targets} target + {self.num_drafters} drafter ranks"


def make_split(section: MeshSection, world_size: int | None) -> Split:
    """The split for a world size; what is not set follows it (1: colocated, 2: 1+1, 3: 2+1, 8: 5+3, else about 5:3).

    Args:
        section: ``mesh.*``.
        world_size: ranks of the running job, or None to take the section's word (``dry_run``).

    Raises:
        UserError: the numbers contradict each other.
    """
    for name, value in (("mesh.target", section.target), ("mesh.drafter", section.drafter)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if world_size is None:
        world_size = _stated_world_size(section)
    unset = section.target is None and section.drafter is None
    if section.colocated or (section.colocated is None and unset and world_size == 1):
        for name, value in (("mesh.target", section.target), ("mesh.drafter", section.drafter)):
            if value not in (None, world_size):
                raise UserError(
                    f"{name} is {value}; with mesh.colocated=true every one of the {world_size} ranks holds both:"
                    " leave it out, or set it to null where a config file has it"
                )
        return Split(world_size, world_size, colocated=True)
    if unset:
        if world_size == 1:
            raise UserError(
                "mesh.colocated is false, but there is one rank; a split needs two: torchrun --nproc-per-node 2"
            )
        target, drafter = KNOWN_SPLITS.get(world_size) or _about_five_to_three(world_size)
    else:
        target = section.target if section.target is not None else world_size - (section.drafter or 0)
        drafter = section.drafter if section.drafter is not None else world_size - target
    if target < 1 or drafter < 1 or target + drafter != world_size:
        raise UserError(
            f"mesh.target ({section.target}) + mesh.drafter ({section.drafter}) must equal the number of ranks"
            f" ({world_size}, torchrun's --nproc-per-node times nodes)"
        )
    return Split(target, drafter, colocated=False)


def _stated_world_size(section: MeshSection) -> int:
    if section.target is None and section.drafter is None:
        return 1
    if section.colocated:
        return section.target or section.drafter or 1
    return (section.target or 1) + (section.drafter or 1)


def _about_five_to_three(world_size: int) -> tuple[int, int]:
    drafter = max(1, round(world_size * 3 / 8))
    return world_size - drafter, drafter


@dataclass(frozen=True)
class Meshes:
    """The process groups that one rank sees.

    Attributes:
        split: who does what.
        rank: this rank.
        device: where it computes.
        target: mesh of the target ranks, None elsewhere.
        drafter: mesh of the drafter ranks, None elsewhere.
        control: gloo group of this rank's role for host-side agreement.
        checkpoint: gloo group of the drafter ranks that only saving uses, None elsewhere.
        channel: gloo group of all ranks that only the channel thread uses; None when colocated.
    """

    split: Split
    rank: int
    device: torch.device
    target: DeviceMesh | None
    drafter: DeviceMesh | None
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup | None
    channel: dist.ProcessGroup | None

    def settle(self, timeout_seconds: float) -> None:
        """Shorten the limit of this rank's groups once loading and compiling are over."""
        groups = [mesh.get_group() for mesh in (self.target, self.drafter) if mesh is not None]
        for group in {*groups, self.control}:
            _set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def make_meshes(split: Split, device: torch.device, timeout_seconds: float) -> Meshes:
    """Create all groups, on all ranks in one order. The default group must be initialised (gloo)."""
    rank = dist.get_rank()
    timeout = timedelta(seconds=timeout_seconds)
    target_ranks = list(range(split.num_targets))
    drafter_ranks = [split.drafter_global(index) for index in range(split.num_drafters)]
    target_mesh = _role_mesh(device, target_ranks, timeout)
    drafter_mesh = target_mesh if split.colocated else _role_mesh(device, drafter_ranks, timeout)
    controls = [_group(ranks, "gloo", timeout) for ranks in (target_ranks, drafter_ranks)]
    saving = _group(drafter_ranks, "gloo", timeout)
    channel = None if split.colocated else _group(list(range(split.world_size)), "gloo", timeout)
    is_drafter = split.drafter_rank(rank) is not None
    return Meshes(
        split=split,
        rank=rank,
        device=device,
        target=target_mesh,
        drafter=drafter_mesh,
        control=controls[1] if is_drafter else controls[0],
        checkpoint=saving if is_drafter else None,
        channel=channel,
    )


def _role_mesh(device: torch.device, ranks: list[int], timeout: timedelta) -> DeviceMesh | None:
    group = _group(ranks, "nccl" if device.type == "cuda" else "gloo", timeout)
    if dist.get_rank() not in ranks:
        return None
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("fsdp",))


def _group(ranks: list[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of some ranks; every rank of the job must call it, also those that get none."""
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend=backend, timeout=timeout))

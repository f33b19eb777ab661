"""What a drafter rank trains, built from a checked job."""

import torch

from dflash_data.ends import FrozenEnds
from dflash_data.float8 import Float8Head, check_float8
from dflash_model import Drafter
from dflash_train.job import DTYPES, Job
from dflash_train.mesh import Meshes
from dflash_train.parallelize import fill_sharded, parallelize_drafter, use_flash_attention
from dflash_train.start import initial_tensors
from dflash_train.step import DraftStep, Objective


def build_drafter(job: Job, meshes: Meshes) -> Drafter:
    """The sharded drafter with start values: meta, compile, shard, allocate, fill."""
    assert meshes.drafter is not None
    with torch.device("meta"):
        drafter = Drafter(job.drafter)
    section = job.config.trainer
    if section.flash_attention:
        use_flash_attention(drafter)
    parallelize_drafter(
        drafter, meshes.drafter, dtype=DTYPES[section.dtype], compile_layers=section.compile,
        activation_budget=section.activation_budget,
    )  # fmt: skip
    drafter.to_empty(device=meshes.device)
    fill_sharded(drafter, initial_tensors(job.config.drafter, job.target, job.drafter, job.config.run.seed))
    return drafter.train()


def build_step(job: Job, meshes: Meshes, drafter: Drafter) -> DraftStep:
    """Forward and loss with the target's ends, which every drafter rank holds whole.

    Raises:
        UserError: ``loss.float8`` on a device that cannot.
    """
    device, config, loss = meshes.device, job.config, job.config.loss
    ends = FrozenEnds.load(job.target, dtype=DTYPES[config.target.dtype], device=device, norm=loss.kind != "ce")
    float8 = None
    if loss.float8:
        check_float8("loss.float8", device, ends.head_VD.dtype)
        float8 = Float8Head(ends.head_VD, drafter.config.output_multiplier)
    return DraftStep(
        drafter, ends, DTYPES[config.trainer.dtype], loss.chunk_rows,
        sparse=device.type == "cuda",
        compiled=config.trainer.compile and device.type == "cuda",
        objective=Objective(loss.kind, loss.dpace_alpha if loss.weighting == "dpace" else None, loss.selector_weight),
        float8=float8,
    )  # fmt: skip

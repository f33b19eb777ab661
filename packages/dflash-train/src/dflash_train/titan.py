"""Everything taken from torchtitan 0.3, in the one module that imports it.

Only parts that work as a library on torch 2.11 and later, on CPU and GPU: optimizer and schedule containers,
garbage-collection control, the peak-FLOPs table.
"""

import logging

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.tools.utils import GarbageCollection, get_peak_flops

from dflash_train.config import OptimizerSection

__all__ = [
    "GarbageCollection",
    "LRSchedulersContainer",
    "OptimizersContainer",
    "apply_gradients",
    "build_optimizer",
    "peak_flops",
]

# Norms, and DFlash2's codebooks (most of whose rows get no gradient in a step) and kernels (which begin at one).
UNDECAYED = r"(norm.*\.weight|base_kernel|_codebook)$"

# Its informative lines (parameter groups, one line a collection) would drown ours; warnings still show.
logging.getLogger("torchtitan").setLevel(logging.WARNING)
logging.getLogger().setLevel(logging.WARNING)


def build_optimizer(
    model: nn.Module, section: OptimizerSection, steps: int
) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """Fused AdamW over the sharded fp32 weights, some of them without decay; linear warmup, then cosine."""
    shared = {"lr": section.lr, "betas": (section.beta1, section.beta2)}
    config = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**shared, "weight_decay": decay}
            )
            for pattern, decay in ((UNDECAYED, 0.0), (".*", section.weight_decay))
        ],
        implementation="fused",
    )
    optimizers = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(
        warmup_steps=max(1, round(section.warmup_ratio * steps)),
        decay_type="cosine",
        min_lr_factor=section.min_lr_ratio,
    )
    return optimizers, schedule.build(optimizers=optimizers, training_steps=steps)


def apply_gradients(
    model: nn.Module,
    optimizers: OptimizersContainer,
    schedule: LRSchedulersContainer,
    *,
    scale: Tensor,
    max_norm: float,
) -> tuple[Tensor, float]:
    """Scale the gradients, clip them, take a step of AdamW and of the schedule, and clear them.

    Both factors go into AdamW's own kernel, which reads the gradients anyway: passes of their own over 1.7 B fp32
    gradients took 8 ms of a 260 ms step on an H200. A step whose gradient is not finite is skipped on all ranks by
    AdamW's own flag, which stays on the device.

    Returns:
        The gradient norm before clipping, on the device, and the learning rate of the step. The norm is not finite if
        the step was skipped; it is the same on all ranks.
    """
    total = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = (total.full_tensor() if isinstance(total, DTensor) else total) * scale
    factor = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    not_finite = (~torch.isfinite(norm)).float()
    for optimizer in optimizers:
        optimizer.grad_scale, optimizer.found_inf = 1 / factor, not_finite  # the fused kernel looks for these two
    rate = float(schedule.schedulers[0].get_last_lr()[0])
    optimizers.step()
    schedule.step()
    optimizers.zero_grad()
    return norm, rate


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device by its name, or None on a CPU."""
    if device.type != "cuda":
        return None
    root = logging.getLogger()
    root.addFilter(_not_of_lspci)
    try:
        return float(get_peak_flops(torch.cuda.get_device_name(device)))
    finally:
        root.removeFilter(_not_of_lspci)


def _not_of_lspci(record: logging.LogRecord) -> bool:
    """It asks lspci too, and warns where there is none; that it does not know the GPU is worth a warning."""
    return not record.getMessage().startswith("Error running lspci")

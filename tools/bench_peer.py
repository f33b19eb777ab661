"""Time SpecForge 0.2.0's own DFlash training step on the sizes of the step bench, with random weights.

One process. As in tools/peer_specforge.py its draft model is under FSDP2 over one rank and trained by our AdamW.
"""

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from bench_step import (
    StepSizes,
    bench_device,
    check_sizes,
    drafter_config,
    random_ends,
    step_figures,
    timed,
    write_profile,
)
from dflash_model import DrafterConfig
from dflash_model.blocks import default_gamma
from dflash_train.cli import parse
from dflash_train.config import OptimizerSection
from dflash_train.job import DTYPES
from dflash_train.parallelize import begin_micro_step
from dflash_train.titan import apply_gradients, build_optimizer
from peer_specforge import PeerOptions, build_peer, has_liger, import_specforge, learn


@dataclass
class PeerBench(PeerOptions, StepSizes):
    """The step bench's sizes, SpecForge's step."""


def random_batch(
    bench: StepSizes, config: DrafterConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A fully supervised row with random hidden states, as SpecForge's collator makes batches."""
    with torch.device(device):
        ids = torch.randint(config.vocab_size, (1, bench.seq_len))
        hidden = torch.randn(1, bench.seq_len, config.context_size, dtype=dtype)
    return {"input_ids": ids, "loss_mask": torch.ones_like(ids), "hidden_states": hidden}


def bench_peer(argv: list[str]) -> dict[str, Any]:
    """Build, run, measure."""
    bench = parse(PeerBench, argv, __doc__ or "")
    check_sizes(bench)
    config, dtype, peer = drafter_config(bench), DTYPES[bench.dtype], import_specforge(bench.specforge)
    device = bench_device()
    torch.manual_seed(0)  # of its start weights and anchors
    model = build_peer(
        peer, bench, config, random_ends(config, device, dtype), num_anchors=bench.anchors,
        gamma=default_gamma(bench.block_size),
    )  # fmt: skip
    strategy, drafter = peer["strategy"].DFlashTrainStrategy(model), model.draft_model
    optimizers, schedule = build_optimizer(drafter, OptimizerSection(), steps=1000)
    batches = cycle([random_batch(bench, config, device, dtype) for _ in range(4)])
    sums = torch.zeros(2, device=device)

    def one_step() -> None:
        step_sums = torch.zeros_like(sums)
        for number in range(bench.packs):
            begin_micro_step(drafter, last=number == bench.packs - 1)
            loss_sum, weight_sum = learn(peer, strategy, next(batches)).loss_terms
            step_sums += torch.stack((loss_sum.detach(), weight_sum))
        apply_gradients(drafter, optimizers, schedule, scale=1 / step_sums[1], max_norm=1.0)
        sums.add_(step_sums)

    times = timed(one_step, device, warmup=bench.warmup, repeats=bench.repeats)
    figures = step_figures(bench, drafter, config, device, times)
    write_profile(bench.profile, one_step)
    return {
        "bench": "peer", "liger": has_liger(bench, device), "chunk_blocks": bench.chunk_blocks, **figures,
        "loss": float(sums[0] / sums[1]),
    }  # fmt: skip

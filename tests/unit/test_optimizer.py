"""A step of the optimizer against plain AdamW with scaled and clipped gradients."""

import pytest
import torch
from torch import nn

from dflash_train.config import OptimizerSection
from dflash_train.titan import apply_gradients, build_optimizer
from support.tiny import DFLASH2, tiny_config, tiny_drafter


@pytest.mark.parametrize("max_norm", [1e3, 0.1], ids=["unclipped", "clipped"])
def test_equals_plain_adamw(max_norm: float) -> None:
    """Five steps, the third of them with a gradient that is not finite: it changes neither weights nor moments.

    Norms, codebooks and base kernels do not decay.
    """
    section = OptimizerSection(lr=1e-2, beta2=0.99, weight_decay=0.1, warmup_ratio=0.4, max_grad_norm=max_norm)
    mine, plain = (tiny_drafter(tiny_config(dflash2=DFLASH2)) for _ in range(2))
    optimizers, schedule = build_optimizer(mine, section, steps=5)
    named = {name: ("norm" in name or "book" in name or "base" in name, p) for name, p in plain.named_parameters()}
    kept, others = ([p for stays, p in named.values() if stays == kind] for kind in (True, False))
    assert len(kept) == 2 + 4 * 2 + 2 + 2 * 2
    reference = torch.optim.AdamW(
        [{"params": kept, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.99)
    )
    generator, scale = torch.Generator().manual_seed(0), torch.tensor(0.3)
    for step in range(5):
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            grad = torch.randn(one.shape, generator=generator)
            grad.view(-1)[0] = float("nan") if step == 2 else grad.view(-1)[0]
            one.grad, other.grad = grad, grad * scale
        norm, rate = apply_gradients(mine, optimizers, schedule, scale=scale, max_norm=max_norm)
        assert all(p.grad is None for p in mine.parameters())
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        torch.testing.assert_close(norm, expected, equal_nan=True)
        if step == 2:
            assert not torch.isfinite(norm)
            continue
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for (name, one), other in zip(mine.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)

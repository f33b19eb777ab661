"""On a GPU: products in float8 are those of the CPU, where they are held against fp64."""

import pytest
import torch
from torch import nn

from dflash_data.float8 import Float8Head, Float8Linear, quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
    ),
]


def test_linear() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(512, 1024, bias=False).bfloat16(), torch.randn(3, 200, 512).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            small = Float8Linear(nn.Linear(512, 1024, bias=False).bfloat16())
        small.to_empty(device=device)
        small.weight.data, small.scale.data = quantize_rows(linear.weight.data.to(device))
        results.append(small(x.to(device)).cpu().float())
    on_cpu, on_gpu = results
    assert (on_gpu - on_cpu).norm() / on_cpu.norm() < 5e-3
    exact = x.double() @ linear.weight.double().T
    assert (on_gpu - exact).norm() / exact.norm() < 5e-2


def test_head() -> None:
    """A sum over 50,000 small slopes is not cut short."""
    torch.manual_seed(0)
    head, hidden = torch.randn(50_176, 256).bfloat16() / 16, torch.randn(70, 256).bfloat16()
    on_cpu, on_gpu = Float8Head(head), Float8Head(head.cuda())
    logits = on_gpu.logits(hidden.cuda())
    assert (logits.cpu().float() - on_cpu.logits(hidden).float()).norm() / logits.float().norm() < 5e-3
    slope = logits.float().softmax(-1).bfloat16()
    exact, found = slope.double() @ head.cuda().double(), on_gpu.back(slope)
    assert (found - exact).norm() / exact.norm() < 0.1
    assert abs(float((found * exact).sum() / (exact * exact).sum()) - 1) < 2e-2

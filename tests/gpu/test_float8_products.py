"""On a GPU: products in float8 are those of the quantized numbers, and the head's are near those of its own."""

import pytest
import torch
from torch import Tensor, nn

from dflash_data.float8 import Float8Head, Float8Linear, quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
    ),
]


def rounded(x: Tensor) -> Tensor:
    """What float8 keeps of the rows, in fp64."""
    x8, scale = quantize_rows(x)
    return x8.double() * scale.double()


def test_linear() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(512, 1024, bias=False).bfloat16().cuda(), torch.randn(3, 200, 512).bfloat16().cuda()
    with torch.device("meta"):
        small = Float8Linear(nn.Linear(512, 1024, bias=False).bfloat16())
    small.to_empty(device="cuda")
    small.weight.data, small.scale.data = quantize_rows(linear.weight.data)
    found, expected = small(x).double(), rounded(x) @ rounded(linear.weight.data).T
    assert (found - expected).norm() / expected.norm() < 5e-3
    exact = x.double() @ linear.weight.data.double().T
    assert (found - exact).norm() / exact.norm() < 5e-2


def test_head() -> None:
    """A sum over 50,000 small slopes is not cut short."""
    torch.manual_seed(0)
    head, hidden = (torch.randn(50_176, 256) / 16).bfloat16().cuda(), torch.randn(70, 256).bfloat16().cuda()
    small = Float8Head(head)
    logits = small.logits(hidden)
    expected = rounded(hidden) @ rounded(head).T
    assert (logits.double() - expected).norm() / expected.norm() < 5e-3
    slope = logits.float().softmax(-1).bfloat16()
    exact, found = slope.double() @ head.double(), small.back(slope)
    assert (found - exact).norm() / exact.norm() < 0.1
    assert abs(float((found * exact).sum() / (exact * exact).sum()) - 1) < 2e-2

"""The chunked head and loss against a dense fp64 reference, values and gradients."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from conftest import Hold
from dflash_train.loss import compiled_chunk_loss, frozen_head_choices, frozen_head_loss


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.4, None), (1.0, 3.0), (2.5, 4.0)])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_dense(
    chunk_rows: int, dtype: torch.dtype, tolerance: float, multiplier: float, softcap: float | None, hold: Hold
) -> None:
    """23 rows, so that chunks of 7 leave a rest; the loss itself is always fp32."""
    torch.manual_seed(0)
    hidden, head = torch.randn(23, 16, dtype=torch.float64), torch.randn(37, 16, dtype=torch.float64)
    hidden, head = hidden.to(dtype), head.to(dtype)
    label, weight = torch.randint(0, 37, (23,)), torch.rand(23)
    weight[5] = 0.0
    reference = hidden.to(torch.float64, copy=True).requires_grad_()
    logits = reference @ head.double().T * multiplier
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    expected = (F.cross_entropy(logits, label, reduction="none") * weight).sum()
    expected.backward()

    mine = hidden.clone().requires_grad_()
    loss, choice = frozen_head_loss(mine, head, label, weight, chunk_rows, multiplier=multiplier, softcap=softcap)
    (3 * loss).backward()
    name = f"{str(dtype).removeprefix('torch.')}{', capped logits' if softcap else ''}"
    hold(f"loss, {name}", "dense in float64, relative", abs(loss.item() / expected.item() - 1), tolerance)
    assert reference.grad is not None
    assert mine.grad is not None
    error = (mine.grad.double() / 3 - reference.grad).norm() / reference.grad.norm()
    hold(f"loss gradient, {name}", "dense in float64, relative", float(error), tolerance)
    assert mine.grad[5].abs().max() == 0
    if dtype is not torch.bfloat16:
        assert torch.equal(choice, logits.argmax(-1))


def test_compiled_for_any_number_of_rows() -> None:
    """Traced by Dynamo and run by its eager backend: one graph for chunks of every size."""
    torch.manual_seed(0)
    head = torch.randn(37, 16)
    compiled_chunk_loss.cache_clear()
    counter = CompileCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=counter))
        for rows in (23, 9, 64, 30):
            hidden, label = torch.randn(rows, 16, requires_grad=True), torch.randint(0, 37, (rows,))
            arguments = (hidden, head, label, torch.rand(rows), 8)
            results = []
            for compiled in (False, True):
                loss, choice = frozen_head_loss(*arguments, softcap=3.0, compiled=compiled)
                (grad,) = torch.autograd.grad(loss, hidden)
                results.append((loss, choice, grad))
            for plain, fused in zip(*results, strict=True):
                torch.testing.assert_close(fused, plain)
    compiled_chunk_loss.cache_clear()
    assert counter.frame_count == 1


def test_choices_are_the_argmax_of_the_logits() -> None:
    hidden, head = torch.randn(23, 16), torch.randn(37, 16)
    assert torch.equal(frozen_head_choices(hidden, head, 7), (hidden @ head.T).argmax(-1))
    assert frozen_head_choices(hidden[:0], head, 7).shape == (0,)


def test_no_rows_is_zero_and_keeps_the_graph() -> None:
    hidden = torch.randn(0, 16, requires_grad=True)
    loss, choice = frozen_head_loss(hidden, torch.randn(37, 16), torch.zeros(0).long(), torch.zeros(0), 8)
    loss.backward()
    assert loss.item() == 0
    assert choice.shape == (0,)
    assert hidden.grad is not None

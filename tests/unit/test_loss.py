"""Losses through the head in chunks against dense fp64 references, values and gradients; their weights by hand."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from conftest import Hold
from dflash_data.float8 import Float8Head
from dflash_train.loss import compiled_rows, dpace_weights, frozen_head_choices, frozen_head_loss

KINDS = ("ce", "kl", "tv", "lk")


def dense(kind: str, logits: Tensor, teacher: Tensor, label: Tensor) -> Tensor:
    """Every row's loss by its definition, in the type of the logits."""
    if kind == "ce":
        return F.cross_entropy(logits, label, reduction="none")
    p, q = teacher.softmax(-1), logits.softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    overlap = torch.minimum(p, q).sum(-1)
    if kind == "lk":
        share = torch.exp(-3 * overlap.detach())
        return share * kl + (1 - share) * (1 - overlap)
    return kl if kind == "kl" else 1 - overlap


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.4, None), (1.0, 3.0), (2.5, 4.0)])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_dense(
    kind: str,
    chunk_rows: int,
    dtype: torch.dtype,
    tolerance: float,
    multiplier: float,
    softcap: float | None,
    hold: Hold,
) -> None:
    """23 rows, so that chunks of 7 leave a rest; the loss itself is always fp32."""
    torch.manual_seed(0)
    hidden, state = torch.randn(2, 23, 16, dtype=torch.float64).to(dtype)
    head = torch.randn(37, 16, dtype=torch.float64).to(dtype)
    label, weight = torch.randint(0, 37, (23,)), torch.rand(23)
    weight[5] = 0.0
    reference = hidden.to(torch.float64, copy=True).requires_grad_()
    logits, teacher = (x @ head.double().T * multiplier for x in (reference, state.double()))
    if softcap is not None:
        logits, teacher = (torch.tanh(x / softcap) * softcap for x in (logits, teacher))
    expected = dense(kind, logits, teacher, label)
    (expected * weight).sum().backward()

    mine = hidden.clone().requires_grad_()
    taught = label if kind == "ce" else state
    loss, choice, *_ = frozen_head_loss(
        mine, head, taught, chunk_rows, kind=kind, multiplier=multiplier, softcap=softcap
    )
    (3 * weight * loss).sum().backward()
    name = f"{kind}, {str(dtype).removeprefix('torch.')}{', capped logits' if softcap else ''}"
    worst = (loss.double() - expected).detach().norm() / expected.detach().norm()
    hold(f"loss {name}", "dense in float64, relative", float(worst), tolerance)
    assert reference.grad is not None
    assert mine.grad is not None
    error = (mine.grad.double() / 3 - reference.grad).norm() / reference.grad.norm()
    hold(f"loss gradient {name}", "dense in float64, relative", float(error), tolerance)
    assert mine.grad[5].abs().max() == 0
    if dtype is not torch.bfloat16:
        assert torch.equal(choice, logits.argmax(-1))


@pytest.mark.parametrize(("kind", "multiplier", "softcap"), [("ce", 1.0, None), ("lk", 1.0, None), ("ce", 2.5, 4.0)])
def test_float8_head(kind: str, multiplier: float, softcap: float | None) -> None:
    """Losses and gradients as far from exact ones as float8 rounds, in many rows and without a bias.

    A vocabulary of 16,384 near-equal logits has probabilities of 6e-5: their slopes must not vanish beside the label's.
    """
    torch.manual_seed(0)
    hidden, state, head = torch.randn(64, 48), torch.randn(64, 48), torch.randn(16_384, 48) / 48**0.5
    taught, results = torch.randint(0, len(head), (64,)) if kind == "ce" else state, []
    for used in (head, Float8Head(head, multiplier)):
        mine = hidden.clone().requires_grad_()
        rows = frozen_head_loss(mine, used, taught, 23, kind=kind, multiplier=multiplier, softcap=softcap)
        rows.loss_R.sum().backward()
        results.append((rows.loss_R.detach(), mine.grad))
    (loss, grad), (found_loss, found_grad) = results
    assert (found_loss - loss).norm() / loss.norm() < 2e-2
    assert (found_grad - grad).norm() / grad.norm() < 0.1
    # Along the exact gradient nothing is lost or added: what rounds is not one-sided.
    assert abs(float((found_grad * grad).sum() / (grad * grad).sum()) - 1) < 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_for_any_number_of_rows(kind: str) -> None:
    """Traced by Dynamo and run by its eager backend: one graph for chunks of every size."""
    torch.manual_seed(0)
    head = torch.randn(37, 16)
    compiled_rows.cache_clear()
    counter = CompileCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=counter))
        for rows in (23, 9, 64, 1, 30):
            hidden = torch.randn(rows, 16, requires_grad=True)
            taught = torch.randint(0, 37, (rows,)) if kind == "ce" else torch.randn(rows, 16)
            results = []
            for compiled in (False, True):
                loss, choice, *_ = frozen_head_loss(hidden, head, taught, 8, kind=kind, softcap=3.0, compiled=compiled)
                results.append((loss, choice, *torch.autograd.grad(loss.sum(), hidden)))
            for plain, fused in zip(*results, strict=True):
                torch.testing.assert_close(fused, plain)
    compiled_rows.cache_clear()
    assert counter.frame_count == 1


def test_dpace_weights_by_hand() -> None:
    """Two blocks of four slots, alpha a half; in the second, slot 2 is not taught (and slot 0 never is)."""
    q = torch.tensor([0.8, 0.5, 0.2, 0.6, 0.4])
    row = torch.tensor([1, 2, 3, 5, 7])
    s = [0.9, 0.75, 0.6, 0.8, 0.7]
    first = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    second = [s[3], s[3] * s[4]]
    expected = [sum(first), sum(first[1:]), first[2], sum(second), second[1]]
    weights = dpace_weights(-q.log(), row, 2, 4, alpha=0.5)
    assert weights.tolist() == pytest.approx(expected)
    assert dpace_weights(-q.log(), row, 2, 4, alpha=1.0).tolist() == [3, 2, 1, 2, 1]


def test_choices_are_the_argmax_of_the_logits() -> None:
    hidden, head = torch.randn(23, 16), torch.randn(37, 16)
    assert torch.equal(frozen_head_choices(hidden, head, 7), (hidden @ head.T).argmax(-1))
    assert frozen_head_choices(hidden[:0], head, 7).shape == (0,)


def test_no_rows_is_zero_and_keeps_the_graph() -> None:
    hidden = torch.randn(0, 16, requires_grad=True)
    loss, choice, *_ = frozen_head_loss(hidden, torch.randn(37, 16), torch.zeros(0).long(), 8)
    loss.sum().backward()
    assert loss.sum().item() == 0
    assert choice.shape == (0,)
    assert hidden.grad is not None

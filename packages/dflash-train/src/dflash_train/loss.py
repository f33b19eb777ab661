"""Weighted cross-entropy through the target's frozen head, without ever holding all logits.

Rows (slots that are supervised) go through the head a chunk at a time. The gradient with respect to the hidden states
is computed in the same pass, while the chunk's logits exist: nothing is recomputed, the frozen head gets no gradient,
and memory holds one chunk of logits whatever the block size.

Legend: R supervised slots, C those of one chunk, D drafter width, V vocabulary.
Source: DFlash paper equation 4 (weights); SpecForge and speculators materialise or recompute here.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ChunkLoss = Callable[[Tensor, Tensor, Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]]


def chunk_loss(
    logits_CV: Tensor, label_C: Tensor, weight_C: Tensor, multiplier: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a chunk, argmax of its rows, and the gradient with respect to its logits, in their type.

    Everything between the two matrix products is in this one function: compiled, the logits are read twice and their
    gradient is written once, and nothing of their size is kept in fp32.
    """
    x_CV = logits_CV.float() * multiplier
    if softcap is not None:
        x_CV = torch.tanh(x_CV / softcap) * softcap
    logsumexp_C = torch.logsumexp(x_CV, dim=-1)
    loss = ((logsumexp_C - x_CV.gather(-1, label_C[:, None])[:, 0]) * weight_C).sum()
    at_label_CV = torch.arange(x_CV.shape[1], device=label_C.device) == label_C[:, None]
    slope_CV = (torch.exp(x_CV - logsumexp_C[:, None]) - at_label_CV.float()) * (weight_C[:, None] * multiplier)
    if softcap is not None:
        slope_CV = slope_CV * (1 - (x_CV / softcap).square())
    return loss, logits_CV.argmax(-1), slope_CV.to(logits_CV.dtype)  # neither factor nor cap changes the order


@cache
def compiled_chunk_loss() -> ChunkLoss:
    """``chunk_loss`` compiled for any number of rows."""
    compiled = torch.compile(chunk_loss, dynamic=False, fullgraph=True)

    def call(logits_CV: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401 - as chunk_loss
        for tensor in (logits_CV, *rest[:2]):
            torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(logits_CV, *rest)

    return call


class FrozenHeadLoss(torch.autograd.Function):
    """``sum_r weight_r * CE(head(hidden_r), label_r)`` and each row's argmax."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context object
        hidden_RD: Tensor,
        head_VD: Tensor,
        label_R: Tensor,
        weight_R: Tensor,
        chunk_rows: int,
        multiplier: float,
        softcap: float | None,
        of_chunk: ChunkLoss,
    ) -> tuple[Tensor, Tensor]:
        """Return the fp32 sum of weighted losses and the int64 argmax of every row."""
        grad_RD = torch.empty_like(hidden_RD)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        choice_R = torch.empty_like(label_R)
        for rows in _chunks(len(hidden_RD), chunk_rows):
            logits_CV = F.linear(hidden_RD[rows].to(head_VD.dtype), head_VD)
            part, choice_R[rows], slope_CV = of_chunk(logits_CV, label_R[rows], weight_R[rows], multiplier, softcap)
            loss += part
            grad_RD[rows] = (slope_CV @ head_VD).to(grad_RD.dtype)
        ctx.save_for_backward(grad_RD)
        ctx.mark_non_differentiable(choice_R)
        return loss, choice_R

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,  # noqa: ANN401 - torch's context object
        grad_loss: Tensor,
        grad_choice: None,
    ) -> tuple[Tensor | None, ...]:
        """Scale the stored gradient."""
        (grad_RD,) = ctx.saved_tensors
        return grad_RD * grad_loss.to(grad_RD.dtype), *(None,) * 7


def _chunks(rows: int, chunk_rows: int) -> list[slice]:
    """Even chunks of at most so many rows: a compiled function takes any number but one."""
    count = -(-rows // chunk_rows)
    edges = [index * rows // count for index in range(count + 1)] if count else []
    return [slice(begin, end) for begin, end in pairwise(edges)]


def frozen_head_loss(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    chunk_rows: int,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum of weighted cross-entropies, and the argmax of every row from the same logits.

    Args:
        hidden_RD: drafter outputs of the supervised slots.
        head_VD: the frozen head; its type is the type of the matrix product, everything after it is fp32.
        label_R: int64 targets.
        weight_R: fp32 weights.
        chunk_rows: rows whose logits exist at once.
        multiplier: positive factor on the logits.
        softcap: c of ``c * tanh(logits / c)``, after the factor; None for no cap.
        compiled: fuse what lies between the matrix products.
    """
    of_chunk = compiled_chunk_loss() if compiled else chunk_loss
    loss, choice_R = FrozenHeadLoss.apply(  # type: ignore[misc]
        hidden_RD, head_VD, label_R, weight_R, chunk_rows, multiplier, softcap, of_chunk
    )
    return loss, choice_R


def frozen_head_choices(hidden_RD: Tensor, head_VD: Tensor, chunk_rows: int) -> Tensor:
    """The most likely token of every row, int64; a factor or a cap on the logits would not change it."""
    parts = [
        F.linear(hidden_RD[rows].to(head_VD.dtype), head_VD).argmax(-1) for rows in _chunks(len(hidden_RD), chunk_rows)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=hidden_RD.device)

"""Weighted cross-entropy through the target's frozen head, without ever holding all logits.

Rows (slots that are supervised) go through the head a chunk at a time. The gradient with respect to the hidden states
is computed in the same pass, while the chunk's logits exist: nothing is recomputed, the frozen head gets no gradient,
and memory holds one chunk of logits whatever the block size.

Legend: R supervised slots, D drafter width, V vocabulary.
Source: DFlash paper equation 4 (weights); SpecForge and speculators materialise or recompute here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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
    ) -> tuple[Tensor, Tensor]:
        """Return the fp32 sum of weighted losses and the int64 argmax of every row."""
        needs_grad = hidden_RD.requires_grad
        grad_RD = torch.empty_like(hidden_RD) if needs_grad else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        choice_R = torch.empty_like(label_R)
        hidden_RD = hidden_RD.detach()
        for begin in range(0, hidden_RD.shape[0], chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            logits_CV = F.linear(hidden_RD[rows].to(head_VD.dtype), head_VD)
            choice_R[rows] = logits_CV.argmax(-1)  # neither the factor nor the cap changes the order
            slope_CV: Tensor | float = multiplier
            if softcap is not None:
                tanh_CV = torch.tanh(logits_CV.float() * (multiplier / softcap))
                logits_CV, slope_CV = tanh_CV * softcap, (1 - tanh_CV.square()) * multiplier
            elif multiplier != 1.0:
                logits_CV = logits_CV.float() * multiplier
            log_p_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
            loss -= (log_p_CV.gather(-1, label_R[rows, None])[:, 0] * weight_R[rows]).sum()
            if grad_RD is not None:
                # d/dlogits = weight * softmax - weight at the label; in place, the weight inside the exponential
                weighted_CV = log_p_CV.add_(weight_R[rows, None].log()).exp_()
                weighted_CV.scatter_add_(-1, label_R[rows, None], -weight_R[rows, None])
                if softcap is not None or multiplier != 1.0:
                    weighted_CV.mul_(slope_CV)
                grad_RD[rows] = (weighted_CV.to(head_VD.dtype) @ head_VD).to(grad_RD.dtype)
        ctx.save_for_backward(grad_RD)
        ctx.mark_non_differentiable(choice_R)
        return loss, choice_R

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,  # noqa: ANN401 - torch's context object
        grad_loss: Tensor,
        grad_choice: None,
    ) -> tuple[Tensor, None, None, None, None, None, None]:  # type: ignore[override]
        """Scale the stored gradient."""
        (grad_RD,) = ctx.saved_tensors
        return grad_RD * grad_loss.to(grad_RD.dtype), None, None, None, None, None, None


def frozen_head_loss(
    hidden_RD: Tensor,
    head_VD: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    chunk_rows: int,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
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
    """
    loss, choice_R = FrozenHeadLoss.apply(  # type: ignore[misc]
        hidden_RD, head_VD, label_R, weight_R, chunk_rows, multiplier, softcap
    )
    return loss, choice_R

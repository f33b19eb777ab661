"""Losses through the target's frozen head, without ever holding all logits.

Rows (slots that are supervised) go through the head a chunk at a time. Each row's loss and its gradient with respect to
the hidden state are computed in the same pass, while the chunk's logits exist: nothing is recomputed, the frozen head
gets no gradient, and memory holds one chunk of logits (two, if the target's are asked for) whatever the block size.
Rows are weighted afterwards, so weights may depend on the losses themselves. The candidates of DFlash2's selector come
from the same logits; what it does with theirs goes back through their rows of the head alone.

Legend: R supervised slots, C those of one chunk, J candidates of a slot, A blocks, K block size, D drafter width,
V vocabulary.
Source: DFlash paper equation 4 (cross-entropy and decay); D-PACE, arXiv 2605.18810; the distribution losses as in
speculators' losses/eager.py. SpecForge and speculators materialise or recompute here.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_data.float8 import Float8Head
from dflash_model import DrafterConfig
from dflash_model.drafter import draft_candidates

# Logits of the drafter, what is taught (labels, or logits of the target), factor and cap of the logits ->
# losses, argmax of the rows, gradients with respect to the logits in their type.
ChunkLoss = Callable[[Tensor, Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]]
LK_ETA = 3.0


def ce_rows(
    logits_CV: Tensor, label_C: Tensor, multiplier: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy with the label.

    Everything between the two matrix products is in one function, for this loss and the others: compiled, the logits
    are read twice and their gradient is written once, and nothing of their size is kept in fp32.
    """
    x_CV = _capped(logits_CV, multiplier, softcap)
    logsumexp_C = torch.logsumexp(x_CV, dim=-1)
    at_label_CV = torch.arange(x_CV.shape[1], device=label_C.device) == label_C[:, None]
    slope_CV = torch.exp(x_CV - logsumexp_C[:, None]) - at_label_CV.float()
    loss_C = logsumexp_C - x_CV.gather(-1, label_C[:, None])[:, 0]
    return loss_C, *_ends(logits_CV, x_CV, slope_CV, multiplier, softcap)


def distribution_rows(
    logits_CV: Tensor, teacher_CV: Tensor, multiplier: float, softcap: float | None, *, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """How far the drafter's distribution q is from the target's p.

    ``kl`` is KL(p | q); ``tv`` is 1 - sum(min(p, q)), the probability of a rejection; ``lk`` mixes them by
    exp(-3 sum(min(p, q))): KL while they are apart, TV once they overlap.
    """
    x_CV = _capped(logits_CV, multiplier, softcap)
    log_q_CV = torch.log_softmax(x_CV, dim=-1)
    log_p_CV = torch.log_softmax(_capped(teacher_CV, multiplier, softcap), dim=-1)
    q_CV, p_CV = log_q_CV.exp(), log_p_CV.exp()
    overlap_C = torch.minimum(p_CV, q_CV).sum(-1)
    share_C = torch.exp(-LK_ETA * overlap_C) if kind == "lk" else torch.full_like(overlap_C, float(kind == "kl"))
    below_CV = (q_CV <= p_CV).float()
    below_C = (q_CV * below_CV).sum(-1)
    loss_C = share_C * (p_CV * (log_p_CV - log_q_CV)).sum(-1) + (1 - share_C) * (1 - overlap_C)
    slope_CV = share_C[:, None] * (q_CV - p_CV) - (1 - share_C)[:, None] * q_CV * (below_CV - below_C[:, None])
    return loss_C, *_ends(logits_CV, x_CV, slope_CV, multiplier, softcap)


ROW_LOSSES: dict[str, ChunkLoss] = {
    "ce": ce_rows,
    **{kind: partial(distribution_rows, kind=kind) for kind in ("kl", "tv", "lk")},
}


def _capped(logits_CV: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    x_CV = logits_CV.float() * multiplier
    return x_CV if softcap is None else torch.tanh(x_CV / softcap) * softcap


def _ends(
    logits_CV: Tensor, x_CV: Tensor, slope_CV: Tensor, multiplier: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The argmax, which neither factor nor cap changes, and the slope through both."""
    slope_CV = slope_CV * multiplier
    if softcap is not None:
        slope_CV = slope_CV * (1 - (x_CV / softcap).square())
    return logits_CV.argmax(-1), slope_CV.to(logits_CV.dtype)


@cache
def compiled_rows(kind: str) -> ChunkLoss:
    """A row loss compiled for any number of rows."""
    compiled = torch.compile(ROW_LOSSES[kind], dynamic=False, fullgraph=True)

    def call(logits_CV: Tensor, taught: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        if len(logits_CV) == 1:  # the compiler takes one row for a constant
            return ROW_LOSSES[kind](logits_CV, taught, *rest)
        for tensor in (logits_CV, taught):
            torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(logits_CV, taught, *rest)

    return call


class HeadRows(NamedTuple):
    """What came of every row's logits.

    Attributes:
        loss_R: fp32.
        choice_R: int64, the most likely token.
        candidate_RJ: int64, the likeliest tokens in no order.
        unary_RJ: their fp32 logits after factor and cap.
    """

    loss_R: Tensor
    choice_R: Tensor
    candidate_RJ: Tensor
    unary_RJ: Tensor


class FrozenHeadLoss(torch.autograd.Function):
    """Each row's loss and argmax, its candidates and their logits before factor and cap."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context object
        hidden_RD: Tensor,
        head: Tensor | Float8Head,
        taught: Tensor,
        chunk_rows: int,
        multiplier: float,
        softcap: float | None,
        of_chunk: ChunkLoss,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return fp32 losses and logits, int64 tokens."""
        head_VD = head if isinstance(head, Tensor) else head.weight_VD
        grad_RD = torch.empty_like(hidden_RD)
        loss_R = torch.empty(len(hidden_RD), dtype=torch.float32, device=hidden_RD.device)
        choice_R = torch.empty(len(hidden_RD), dtype=torch.long, device=hidden_RD.device)
        logit_RJ, candidate_RJ = loss_R.new_empty(len(loss_R), top_k), choice_R.new_empty(len(loss_R), top_k)
        for rows in _chunks(len(hidden_RD), chunk_rows):
            hidden_CD = hidden_RD[rows].to(head_VD.dtype)
            logits_CV = F.linear(hidden_CD, head) if isinstance(head, Tensor) else head.logits(hidden_CD)
            goal = taught[rows] if taught.dim() == 1 else F.linear(taught[rows].to(head_VD.dtype), head_VD)
            loss_R[rows], choice_R[rows], slope_CV = of_chunk(logits_CV, goal, multiplier, softcap)
            grad_RD[rows] = slope_CV @ head if isinstance(head, Tensor) else head.back(slope_CV)
            if top_k:
                logit_RJ[rows], candidate_RJ[rows] = logits_CV.topk(top_k, sorted=False)
        ctx.save_for_backward(grad_RD, candidate_RJ, head_VD)
        ctx.mark_non_differentiable(choice_R, candidate_RJ)
        return loss_R, choice_R, candidate_RJ, logit_RJ

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,  # noqa: ANN401 - torch's context object
        grad_loss_R: Tensor,
        grad_choice: None,
        grad_candidate: None,
        grad_logit_RJ: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Scale the stored gradients, and add the rows of the head that candidates' gradients ask for."""
        grad_RD, candidate_RJ, head_VD = ctx.saved_tensors
        total_RD = grad_RD * grad_loss_R[:, None]
        if candidate_RJ.shape[1]:
            share_RJ = grad_logit_RJ.to(head_VD.dtype)
            total_RD = total_RD + F.embedding_bag(candidate_RJ, head_VD, per_sample_weights=share_RJ, mode="sum")
        return total_RD.to(grad_RD.dtype), *(None,) * 7


def _chunks(rows: int, chunk_rows: int) -> list[slice]:
    """Even chunks of at most so many rows."""
    count = -(-rows // chunk_rows)
    edges = [index * rows // count for index in range(count + 1)] if count else []
    return [slice(begin, end) for begin, end in pairwise(edges)]


def frozen_head_loss(
    hidden_RD: Tensor,
    head: Tensor | Float8Head,
    taught: Tensor,
    chunk_rows: int,
    *,
    kind: str = "ce",
    multiplier: float = 1.0,
    softcap: float | None = None,
    compiled: bool = False,
    top_k: int = 0,
) -> HeadRows:
    """Every row's loss, and its likeliest tokens from the same logits.

    Args:
        hidden_RD: drafter outputs of the supervised slots.
        head: the frozen one, ``[V, D]``; its type is the type of the matrix product, everything after it is fp32. Or
            that in float8, for the products of the drafter's hidden states.
        taught: for ``ce`` int64 labels ``[R]``; else the target's normed last hidden states ``[R, D]``.
        chunk_rows: rows whose logits exist at once.
        kind: ``ce``, ``kl``, ``tv`` or ``lk``.
        multiplier: positive factor on the logits.
        softcap: c of ``c * tanh(logits / c)``, after the factor; None for no cap.
        compiled: fuse what lies between the matrix products.
        top_k: J, candidates of each row.
    """
    of_chunk = compiled_rows(kind) if compiled else ROW_LOSSES[kind]
    loss_R, choice_R, candidate_RJ, logit_RJ = FrozenHeadLoss.apply(  # type: ignore[misc]
        hidden_RD, head, taught, chunk_rows, multiplier, softcap, of_chunk, top_k
    )
    return HeadRows(loss_R, choice_R, candidate_RJ, _capped(logit_RJ, multiplier, softcap))


def selector_loss(score_RJ: Tensor, candidate_RJ: Tensor, label_R: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the scores with the label, and whether it is among the candidates; 0 where it is not.

    There, no score drafts it.
    """
    at_label_RJ = candidate_RJ == label_R[:, None]
    among_R = at_label_RJ.any(-1)
    loss_R = score_RJ.logsumexp(-1) - (score_RJ * at_label_RJ).sum(-1)
    return torch.where(among_R, loss_R, 0.0), among_R


def dpace_weights(loss_R: Tensor, row_R: Tensor, num_blocks: int, block_size: int, alpha: float) -> Tensor:
    """D-PACE: a slot counts as much as the prefixes that go through it are likely to be accepted.

    With q the drafter's probability of the label, s = (1 - alpha) q + alpha (1 where nothing is taught) and P the
    product of s up to a slot, a slot weighs the sum of P over itself and all taught slots behind it.

    Args:
        loss_R: cross-entropies, detached.
        row_R: where each row lies in ``[A, K]``, flattened.
        num_blocks: A.
        block_size: K.
        alpha: 0 to 1; at 1 the weights only count what follows.
    """
    survival_Q = torch.ones(num_blocks * block_size, device=loss_R.device)
    survival_Q[row_R] = (1 - alpha) * torch.exp(-loss_R) + alpha
    taught_Q = torch.zeros_like(survival_Q)
    taught_Q[row_R] = 1.0
    prefix_AK = survival_Q.view(num_blocks, block_size).cumprod(-1) * taught_Q.view(num_blocks, block_size)
    return prefix_AK.flip(-1).cumsum(-1).flip(-1).flatten()[row_R]


def frozen_head_choices(hidden_RD: Tensor, head_VD: Tensor, chunk_rows: int) -> Tensor:
    """The most likely token of every row, int64; a factor or a cap on the logits would not change it."""
    chunks = (hidden_RD[rows].to(head_VD.dtype) for rows in _chunks(len(hidden_RD), chunk_rows))
    parts = [F.linear(chunk_CD, head_VD).argmax(-1) for chunk_CD in chunks]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=hidden_RD.device)


def frozen_head_candidates(
    config: DrafterConfig, hidden_RD: Tensor, head_VD: Tensor, chunk_rows: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Every row's candidates and their logits."""
    chunks = _chunks(len(hidden_RD), chunk_rows) or [slice(0)]
    parts = [draft_candidates(config, hidden_RD[rows], head_VD, top_k) for rows in chunks]
    return torch.cat([candidate for candidate, _ in parts]), torch.cat([unary for _, unary in parts])

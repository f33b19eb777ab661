"""Sampling and the rejection rule that keeps the target's distribution.

A proposal drawn from the drafter's distribution q is kept with probability ``min(1, p / q)``; the first one that is
not kept is replaced by a draw from the normalised positive part of ``p - q``. Whatever q is, the text is distributed
as if it had been drawn from p.

Legend: K proposals and one, V vocabulary.
Source: Leviathan et al. 2023, appendix A.1; DFlash paper section 4.3; z-lab dflash 0.1.0 uses the same rule.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_model.errors import UserError

COLDEST = 1e-5  # below it logits divided by it leave fp32, and all but ties would be greedy anyway


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from logits.

    Attributes:
        temperature: divides the logits; 0 takes the largest.
        top_k: only the k most likely tokens; 0 for all.
        top_p: of these, the smallest set of the most likely tokens that reaches this probability.
        seed: of this call's random numbers; None continues torch's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no distribution.

        Raises:
            UserError: one sentence with the key and what is allowed.
        """
        if not (self.temperature == 0 or COLDEST <= self.temperature < math.inf):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy), or {COLDEST:g} or more")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit wins."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """fp32 distribution over the last dimension, after temperature, top-k and top-p in this order."""
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        p = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = p.sort(dim=-1, descending=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
            p = torch.zeros_like(p).scatter(-1, order, ordered)
            p = p / p.sum(-1, keepdim=True)
        return p

    def generator(self, device: torch.device) -> torch.Generator | None:
        """The source of randomness of one call."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)


def draw(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token from each row of ``[..., V]``."""
    return torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1])


def reject(proposal: Tensor, q: Tensor, p: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """How many proposals are kept, and the token that follows them; both scalars on the device.

    Args:
        proposal: ``[K - 1]`` tokens, each drawn from its row of q.
        q: ``[K - 1, V]`` the drafter's distributions.
        p: ``[K, V]`` the target's, the last one after all proposals.
        generator: source of randomness.
    """
    num = len(proposal)
    at = proposal[:, None]
    p_at, q_at = p[:num].gather(-1, at)[:, 0], q.gather(-1, at)[:, 0]
    uniform = torch.rand(num, device=p.device, generator=generator)
    accepted = (uniform * q_at < p_at).long().cumprod(0).sum()
    # The row at ``accepted``: p - q where a proposal was refused, p itself after the last proposal.
    q_padded = torch.cat((q, torch.zeros_like(p[:1])))
    row = accepted[None]  # index_select: a scalar index would wait for the device
    p_row = p.index_select(0, row)
    rest = (p_row - q_padded.index_select(0, row)).clamp_min(0)
    # p and q equal to the last bit leave nothing: then a refusal had probability 0, and any draw from p is right.
    rest = torch.where(rest.sum() > 0, rest, p_row)
    return accepted, draw(rest, generator)[0]

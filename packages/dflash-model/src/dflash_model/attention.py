"""Attention over [context | block] keys: flex_attention for a BlockMask, SDPA for a dense mask or none."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mask = BlockMask | Tensor | None

# For texts that grow. On Hopper and later torch 2.11 would take cuDNN's attention first, which plans every new length
# anew: SmolLM2-135M with a drafter of five layers on an H200, 99 ms a round, and 34 when all lengths had been met.
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Uncompiled flex_attention materialises the scores. Inside a compiled layer this inner compile is simply inlined;
# it matters only for a layer that runs eagerly.
_compiled_flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend(q_BNQH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, mask: Mask) -> Tensor:
    """Grouped-query attention, scaled by ``H ** -0.5``.

    Args:
        q_BNQH: queries of the block slots.
        k_BMTH: keys, context first; T = S + Q.
        v_BMTH: values.
        mask: what is visible (see ``mask.py``); None when everything is.

    Returns:
        ``[B, N, Q, H]``.
    """
    if isinstance(mask, BlockMask):
        out = _compiled_flex_attention(q_BNQH, k_BMTH, v_BMTH, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out
    return F.scaled_dot_product_attention(q_BNQH, k_BMTH, v_BMTH, attn_mask=mask, enable_gqa=True)

"""Attention over [context | block] keys: flex_attention for a BlockMask, SDPA for a dense mask or none."""

from contextlib import ContextDecorator
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mask = BlockMask | Tensor | None

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


class WithoutCudnn(ContextDecorator):
    """Attention keeps off cuDNN inside, for texts that grow; where threads overlap, until the last one has left.

    On Hopper GPUs and later torch 2.11 takes cuDNN first, which makes a plan for each new length: probably why, with
    SmolLM2-135M and a drafter of five layers on an H200, a round took 99 ms, and 34 when all lengths had been met.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


without_cudnn = WithoutCudnn()  # the flag is the process's

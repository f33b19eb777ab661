"""Attention for decoding large batches with transformers.

With a mask, SDPA takes no grouped keys, so transformers copies each key and value once for every query head that shares
it, at every token. Decoding is bound by memory: those copies are most of what it moves.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "grouped_decode"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ANN401 - handed on
) -> tuple[Tensor, None]:
    """Attention of one new token a row, each key read once for the query heads that share it.

    These heads go to SDPA as if they were that many tokens; longer queries go there as they are.

    Args:
        module: the attention layer.
        query: ``[B, N, T, H]``.
        key: ``[B, M, S, H]``, as many query heads ``N / M`` to each.
        value: like ``key``.
        attention_mask: what may be seen, boolean or added, ``[B, 1, T, S]``; None for everything.
        scaling: of the scores.
        kwargs: of SDPA.

    Returns:
        ``[B, T, N, H]``.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, _, size = query.shape
    grouped = query.view(batch, key.shape[1], -1, size)
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.shape[1] == heads > 1:
            attention_mask = attention_mask.reshape(batch, key.shape[1], -1, key.shape[2])
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, -1), None


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model that attends by SDPA; others stay as they are."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)

"""Who may attend to whom, once as ranges, once dense, once block-sparse for flex_attention.

Queries are the Q = A*K block slots; keys are the S context tokens followed by the same Q slots. Documents of a
packed row are contiguous, so what a slot sees is two ranges of keys. Context: from the start of its document up to,
and without, its block's anchor. (At inference the anchor's own target features do not exist yet.) Slots: those of its
block. A padding block has no context and still sees itself, so no query row is empty and softmax never divides by zero.

Legend: B batch, S context tokens, A blocks (anchors), K block size, Q = A*K.
Source: DFlash paper section 4.2; z-lab dflash 0.1.0 for the sliding rules (window counted from each query).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # flex_attention's default sparse block on both axes

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Visible(NamedTuple):
    """The keys that each query sees, ``[low, high)`` of the context and ``[begin, end)`` of the slots.

    Ranges rather than the rule itself: in a tile that is visible in part, flex_attention then compares four numbers of
    a query with each key, and divides by nothing.

    Attributes:
        low_BQ: first context token; where a query sees none, it is not below ``high_BQ``.
        high_BQ: end of the context.
        begin_Q: its block's first slot, as a key: S and more.
        end_Q: end of the slots it sees.
    """

    low_BQ: Tensor
    high_BQ: Tensor
    begin_Q: Tensor
    end_Q: Tensor

    def mask_mod(self) -> MaskMod:
        """As flex_attention wants it: ``(batch, head, query, key) -> bool``."""
        low_BQ, high_BQ, begin_Q, end_Q = self

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            in_context = (kv >= low_BQ[b, q]) & (kv < high_BQ[b, q])
            return in_context | ((kv >= begin_Q[q]) & (kv < end_Q[q]))

        return visible


def visible_keys(
    first_BA: Tensor, anchor_BA: Tensor, context_len: int, block_size: int, *, window: int | None, causal: bool
) -> Visible:
    """What every slot sees.

    Args:
        first_BA: first visible context token of each block.
        anchor_BA: the block's anchor, at most S; context is visible strictly before it.
        context_len: S.
        block_size: K.
        window: visible tokens back from each query, itself included; None for all.
        causal: slots of a block see only themselves and earlier slots.
    """
    query_Q = torch.arange(anchor_BA.shape[1] * block_size, device=anchor_BA.device)
    slot_Q = query_Q % block_size
    low_BQ, high_BQ = (x.repeat_interleave(block_size, dim=1) for x in (first_BA, anchor_BA))
    if window is not None:
        low_BQ = torch.maximum(low_BQ, high_BQ + slot_Q - window + 1)
    begin_Q = context_len + query_Q - slot_Q
    end_Q = begin_Q + (slot_Q + 1 if causal else block_size)
    return Visible(low_BQ, high_BQ, begin_Q, end_Q)


def dense_mask(
    first_BA: Tensor, anchor_BA: Tensor, context_len: int, block_size: int, *, window: int | None, causal: bool
) -> Tensor:
    """The ranges of ``visible_keys`` as a boolean tensor ``[B, 1, Q, S + Q]``, for SDPA and for tests."""
    visible = visible_keys(first_BA, anchor_BA, context_len, block_size, window=window, causal=causal)
    batch, num_queries = visible.low_BQ.shape
    b, q, kv = (torch.arange(n, device=anchor_BA.device) for n in (batch, num_queries, context_len + num_queries))
    return visible.mask_mod()(b[:, None, None], b, q[:, None], kv)[:, None]


def sparse_mask(
    first_BA: Tensor, anchor_BA: Tensor, context_len: int, block_size: int, *, window: int | None, causal: bool
) -> BlockMask:
    """The ranges of ``visible_keys`` as a BlockMask.

    The dense ``[Q, S + Q]`` grid is never built (8192 x 12288 at 512 anchors of 16): per tile of queries the visible
    context is one range of tiles, plus the tiles that hold the blocks themselves. With sorted anchors the ranges are
    tight; unsorted anchors stay correct and only cost speed.

    Raises:
        ValueError: S or Q is not a multiple of 128.
    """
    batch, num_blocks = anchor_BA.shape
    num_queries = num_blocks * block_size
    if context_len % TILE or num_queries % TILE:
        raise ValueError(
            f"flex_attention tiles are {TILE} wide: context length ({context_len}) and anchors x block size"
            f" ({num_blocks} x {block_size}) must be multiples of {TILE}"
        )
    ranges = visible_keys(first_BA, anchor_BA, context_len, block_size, window=window, causal=causal)
    visible = Visible(*(part.to(torch.int32) for part in ranges))  # half of what the kernels read
    q_tiles, context_tiles = num_queries // TILE, context_len // TILE
    # The extremes over a tile's queries decide about each tile of keys.
    empty_BQ = visible.high_BQ <= visible.low_BQ
    low = visible.low_BQ.masked_fill(empty_BQ, context_len).view(batch, q_tiles, TILE)
    high = visible.high_BQ.masked_fill(empty_BQ, 0).view(batch, q_tiles, TILE)
    own_begin, own_end = visible.begin_Q.view(q_tiles, TILE)[:, :1], visible.end_Q.view(q_tiles, TILE)[:, -1:]
    tile = torch.arange(context_tiles + q_tiles, device=anchor_BA.device)
    begin, end = tile * TILE, (tile + 1) * TILE
    touched = (begin < high.amax(-1, keepdim=True)) & (end > low.amin(-1, keepdim=True))
    full = (begin >= low.amax(-1, keepdim=True)) & (end <= high.amin(-1, keepdim=True))
    own = (begin < own_end) & (end > own_begin)
    return BlockMask.from_kv_blocks(
        *_ordered((touched & ~full) | own),
        *_ordered(full),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=visible.mask_mod(),
        seq_lengths=(num_queries, context_len + num_queries),
    )


def _ordered(tiles_BQT: Tensor) -> tuple[Tensor, Tensor]:
    """Count and list the chosen tiles of each row, chosen ones first, as BlockMask stores them."""
    count = tiles_BQT.sum(-1, dtype=torch.int32)[:, None]
    indices = torch.argsort(tiles_BQT.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
    return count.contiguous(), indices.contiguous()

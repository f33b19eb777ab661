"""Who may attend to whom, once as a rule, once dense, once block-sparse for flex_attention.

Queries are the Q = A*K block slots; keys are the S context tokens followed by the same Q slots. Documents of a
packed row are contiguous, so the context that block ``a`` may see is the range ``[first[a], anchor[a])``: from the
start of its document up to, and without, its anchor. (At inference the anchor's own target features do not exist yet.)
A padding block has an empty range and still sees itself, so no query row is empty and softmax never divides by zero.

Legend: B batch, S context tokens, A blocks (anchors), K block size, Q = A*K.
Source: DFlash paper section 4.2; z-lab dflash 0.1.0 for the sliding rules (window counted from each query).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # flex_attention's default sparse block on both axes

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def make_mask_mod(
    first_BA: Tensor, anchor_BA: Tensor, context_len: int, block_size: int, *, window: int | None, causal: bool
) -> MaskMod:
    """The rule itself, as flex_attention wants it: ``(batch, head, query, key) -> bool``.

    Args:
        first_BA: first visible context token of each block.
        anchor_BA: the block's anchor; context is visible strictly before it.
        context_len: S.
        block_size: K.
        window: visible tokens back from each query, itself included; None for all.
        causal: slots of a block see only themselves and earlier slots.
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, slot = q // block_size, q % block_size
        first, anchor = first_BA[b, block], anchor_BA[b, block]
        in_context = (kv < context_len) & (kv >= first) & (kv < anchor)
        if window is not None:
            in_context = in_context & (anchor + slot - kv < window)
        draft = kv - context_len
        in_block = (draft >= 0) & (draft // block_size == block)
        if causal:
            in_block = in_block & (draft % block_size <= slot)
        return in_context | in_block

    return mask_mod


def dense_mask(
    first_BA: Tensor, anchor_BA: Tensor, context_len: int, block_size: int, *, window: int | None, causal: bool
) -> Tensor:
    """The same rule as a boolean tensor ``[B, 1, Q, S + Q]``, for SDPA and for tests."""
    batch, num_blocks = anchor_BA.shape
    num_queries = num_blocks * block_size
    device = anchor_BA.device
    mod = make_mask_mod(first_BA, anchor_BA, context_len, block_size, window=window, causal=causal)
    b = torch.arange(batch, device=device)[:, None, None]
    q = torch.arange(num_queries, device=device)[None, :, None]
    kv = torch.arange(context_len + num_queries, device=device)[None, None, :]
    return mod(b, torch.zeros_like(b), q, kv)[:, None]


def sparse_mask(
    first_BA: Tensor, anchor_BA: Tensor, context_len: int, block_size: int, *, window: int | None, causal: bool
) -> BlockMask:
    """The same rule as a BlockMask, computed from the ranges alone.

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
    q_tiles, context_tiles = num_queries // TILE, context_len // TILE
    slot_Q = torch.arange(num_queries, device=anchor_BA.device) % block_size
    first_BQ, anchor_BQ = (x.repeat_interleave(block_size, dim=1) for x in (first_BA, anchor_BA))
    low_BQ = first_BQ if window is None else torch.maximum(first_BQ, anchor_BQ + slot_Q - window + 1)
    empty_BQ = anchor_BQ <= low_BQ
    # Visible context of each query is [low, high); the extremes over a tile's queries decide about each tile of keys.
    low = torch.where(empty_BQ, context_len, low_BQ).view(batch, q_tiles, TILE)
    high = torch.where(empty_BQ, 0, anchor_BQ).view(batch, q_tiles, TILE)
    tile = torch.arange(context_tiles + q_tiles, device=anchor_BA.device)
    begin, end = tile * TILE, (tile + 1) * TILE
    is_context = tile < context_tiles
    touched = is_context & (begin < high.amax(-1, keepdim=True)) & (end > low.amin(-1, keepdim=True))
    full = is_context & (begin >= low.amax(-1, keepdim=True)) & (end <= high.amin(-1, keepdim=True))
    first_query = torch.arange(q_tiles, device=tile.device)[:, None] * TILE
    own_first = context_len + first_query // block_size * block_size
    own_end = context_len + ((first_query + TILE - 1) // block_size + 1) * block_size
    own = ~is_context & (begin < own_end) & (end > own_first)
    mod = make_mask_mod(first_BA, anchor_BA, context_len, block_size, window=window, causal=causal)
    return BlockMask.from_kv_blocks(
        *_ordered((touched & ~full) | own),
        *_ordered(full),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mod,
        seq_lengths=(num_queries, context_len + num_queries),
    )


def _ordered(tiles_BQT: Tensor) -> tuple[Tensor, Tensor]:
    """Count and list the chosen tiles of each row, chosen ones first, as BlockMask stores them."""
    count = tiles_BQT.sum(-1, dtype=torch.int32)[:, None]
    indices = torch.argsort(tiles_BQT.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
    return count.contiguous(), indices.contiguous()

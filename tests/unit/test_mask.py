"""The mask rule against a definition written out with loops, and its block-sparse form against the dense one."""

import numpy as np
import pytest
import torch

from dflash_model.blocks import first_of_document, sample_anchors
from dflash_model.mask import dense_mask, sparse_mask
from support.tiny import packed_row

CASES = [(None, False), (40, True), (40, False), (None, True)]


def brute_force(
    first: list[int], anchor: list[int], context: int, size: int, window: int | None, causal: bool
) -> np.ndarray:
    num = len(anchor) * size
    out = np.zeros((num, context + num), dtype=bool)
    for q in range(num):
        block, slot = divmod(q, size)
        for kv in range(context):
            position = anchor[block] + slot
            seen = first[block] <= kv < anchor[block]
            out[q, kv] = seen and (window is None or position - kv < window)
        for other in range(size):
            out[q, context + block * size + other] = other <= slot or not causal
    return out


def random_blocks(seed: int, context: int, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted anchors in a packed row, some blocks unused."""
    rng = np.random.default_rng(seed)
    _, mask, doc = packed_row(rng, 4, context)
    anchors = sample_anchors(mask, doc, num - 3, rng)
    anchor, first = np.zeros((2, num), dtype=np.int64)
    anchor[: len(anchors)], first[: len(anchors)] = anchors, first_of_document(doc, anchors)
    return torch.from_numpy(first)[None], torch.from_numpy(anchor)[None]


@pytest.mark.parametrize(("window", "causal"), CASES)
@pytest.mark.parametrize("size", [8, 5])
def test_dense_mask_is_the_definition(window: int | None, causal: bool, size: int) -> None:
    for seed in range(5):
        first, anchor = random_blocks(seed, 96, 16)
        found = dense_mask(first, anchor, 96, size, window=window, causal=causal)[0, 0].numpy()
        expected = brute_force(first[0].tolist(), anchor[0].tolist(), 96, size, window, causal)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("window", "causal"), CASES)
@pytest.mark.parametrize(("size", "num"), [(16, 64), (8, 128), (10, 128), (7, 128)])
def test_sparse_mask_covers_exactly_the_dense_one(window: int | None, causal: bool, size: int, num: int) -> None:
    """Full tiles hold no hidden pair, listed tiles hold every visible pair, and no tile is listed twice."""
    context = 512
    for seed in range(3):
        first, anchor = random_blocks(seed, context, num)
        dense = dense_mask(first, anchor, context, size, window=window, causal=causal)[0, 0]
        mask = sparse_mask(first, anchor, context, size, window=window, causal=causal)
        tiles = dense.view(num * size // 128, 128, -1, 128).permute(0, 2, 1, 3)
        partial = tile_grid(mask.kv_num_blocks, mask.kv_indices)
        full = tile_grid(mask.full_kv_num_blocks, mask.full_kv_indices)
        assert not (partial & full).any()
        assert tiles[full].all()
        assert not tiles[~(partial | full)].any()
        used = tiles.any(-1).any(-1)
        assert (partial | full).sum() <= 1.5 * used.sum(), "more tiles than the ranges need"


def tile_grid(count: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    rows, columns = indices.shape[-2:]
    grid = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        grid[row, indices[0, 0, row, : int(count[0, 0, row])].long()] = True
    return grid


def test_sparse_mask_refuses_ragged_tiles() -> None:
    first, anchor = random_blocks(0, 96, 16)
    with pytest.raises(ValueError, match="multiples of 128"):
        sparse_mask(first, anchor, 96, 8, window=None, causal=False)

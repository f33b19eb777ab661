"""Anchors, the blocks that start at them, and what each slot is taught.

Runs on the CPU while rows are collated (numpy, no device, no torch), so that the numbers of supervised slots are
known to the host and the same everywhere. Slot 0 holds the clean anchor token and is never supervised; slot k
predicts the token at ``anchor + k``.

Legend: S tokens of the row, A anchors, K block size.
Source: DFlash paper section 4.2, equation 4 and appendix A.1.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

# Published decay lengths (paper, appendix A.1) by block size; others are interpolated, beyond the ends proportional.
GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(block_size: int) -> float:
    """Decay length of the slot weights for a block size: 4 (8), 5 (10), 7 (16), in between linear."""
    sizes = sorted(GAMMA)
    if not sizes[0] <= block_size <= sizes[-1]:
        nearest = min(sizes, key=lambda size: abs(size - block_size))
        return GAMMA[nearest] * block_size / nearest
    return float(np.interp(block_size, sizes, [GAMMA[size] for size in sizes]))


def anchor_candidates(loss_mask_S: Bools, doc_S: Ints) -> Ints:
    """Positions that may start a block: supervised, and so is the next token of the same document."""
    ok = loss_mask_S[:-1] & loss_mask_S[1:] & (doc_S[:-1] == doc_S[1:]) & (doc_S[:-1] >= 0)
    return np.flatnonzero(ok).astype(np.int32)


def sample_anchors(loss_mask_S: Bools, doc_S: Ints, num_anchors: int, rng: np.random.Generator) -> Ints:
    """Draw at most ``num_anchors`` candidates without replacement, uniformly, in ascending order."""
    candidates = anchor_candidates(loss_mask_S, doc_S)
    if len(candidates) > num_anchors:
        candidates = np.sort(rng.choice(candidates, size=num_anchors, replace=False))
    return candidates


def first_of_document(doc_S: Ints, anchor_A: Ints) -> Ints:
    """Row index where each anchor's document begins."""
    starts = np.flatnonzero(np.diff(doc_S, prepend=doc_S[:1] - 1))
    return starts[np.searchsorted(starts, anchor_A, side="right") - 1].astype(np.int32)


def label_blocks(
    input_ids_S: Ints, loss_mask_S: Bools, doc_S: Ints, anchor_A: Ints, block_size: int, gamma: float
) -> tuple[Ints, Floats]:
    """Labels and loss weights of the blocks at ``anchor_A``.

    A slot counts while it stays in the row, in the anchor's document and in supervised text without a gap: what comes
    after a gap can never be drafted from this anchor. Weights are ``exp(-(k - 1) / gamma)``, zero where not counted.

    Returns:
        ``label_AK`` (0 where not counted) and ``weight_AK``.
    """
    num_tokens = len(input_ids_S)
    position_AK = anchor_A[:, None] + np.arange(block_size, dtype=np.int32)[None, :]
    inside_AK = position_AK < num_tokens
    at_AK = np.minimum(position_AK, num_tokens - 1)
    counted_AK = inside_AK & loss_mask_S[at_AK] & (doc_S[at_AK] == doc_S[anchor_A][:, None])
    counted_AK[:, 0] = True
    counted_AK = np.logical_and.accumulate(counted_AK, axis=1)
    counted_AK[:, 0] = False
    decay_K = np.exp(-(np.arange(block_size, dtype=np.float64) - 1) / gamma).astype(np.float32)
    label_AK = np.where(counted_AK, input_ids_S[at_AK], 0).astype(np.int32)
    return label_AK, np.where(counted_AK, decay_K, np.float32(0))
